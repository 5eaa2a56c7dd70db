// Draws what picture.py has collected. Runs in the browser, after uPlot.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

// Grafana's names for colours, and the palette of what has none.
const COLOURS = {
  green: "#73bf69", "light-green": "#96d98d", "dark-green": "#37872d", yellow: "#fade2a", red: "#f2495c",
  "dark-red": "#c4162a", orange: "#ff9830", "light-orange": "#ffb357", blue: "#5794f2", "light-blue": "#8ab8ff",
  purple: "#b877d9", "light-purple": "#ca95e5", text: "#ccccdc",
};
const PALETTE = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0", "#37872d", "#e0b400"];
const GRID = "#2a2d34", FAINT = "#9a9aa8";
const colour = (name) => COLOURS[name] || name;

// Values as Grafana's units have them.

const number = (value, digits) => {
  const size = Math.abs(value);
  const decimals = digits ?? (size === 0 || size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
  return value.toFixed(decimals).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
};
const scaled = (value, base, prefixes) => {
  let step = 0;
  while (Math.abs(value) >= base && step < prefixes.length - 1) { value /= base; step += 1; }
  return [value, prefixes[step]];
};
const UNITS = {
  s(value) {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${number(value * 1e6)} µs`;
    if (size < 1) return `${number(value * 1e3, size < 0.01 ? 2 : size < 0.1 ? 1 : 0)} ms`;
    return size < 120 ? `${number(value)} s` : size < 7200 ? `${number(value / 60)} min` : `${number(value / 3600)} h`;
  },
  percentunit: (value) => `${number(value * 100, Math.abs(value) < 0.1 ? 2 : 1)}%`,
  bytes(value) { const [size, prefix] = scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]); return `${number(size)} ${prefix}`; },
  reqps: (value) => `${number(value)} req/s`,
  ops: (value) => `${number(value)} ops/s`,
  none(value) { const [size, prefix] = scaled(value, 1000, ["", " K", " Mil"]); return number(size) + prefix; },
  string: String,
};
function format(value, unit) {
  if (value === null || value === undefined) return "no data";
  if (unit?.startsWith("si:")) {
    const [size, prefix] = scaled(value, 1000, ["", "k", "M", "G"]);
    return `${number(size)} ${prefix}${unit.slice(3)}`;
  }
  return (UNITS[unit] || UNITS.none)(value);
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const last = (values) => values[values.length - 1];
const CALCS = {
  mean: ["Mean", (values) => known(values).reduce((sum, value) => sum + value, 0) / known(values).length],
  max: ["Max", (values) => Math.max(...known(values))],
  lastNotNull: ["Last", (values) => last(known(values))],
};

function element(parent, kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function canvas(parent, width, height) {
  const made = element(parent, "canvas");
  made.width = width; made.height = height;
  return made.getContext("2d");
}

function colourOf(line, index, defaults) {
  const fixed = line.properties.color || (defaults.color?.mode === "fixed" ? defaults.color : null);
  return fixed?.fixedColor ? colour(fixed.fixedColor) : PALETTE[index % PALETTE.length];
}

function byThreshold(value, defaults) {
  const passed = (defaults.thresholds?.steps || []).filter((step) => step.value === null || value >= step.value);
  return colour(last(passed)?.color || "text");
}

const POWERS = Array.from({ length: 50 }, (_, exponent) => 2 ** exponent);

// Panels

function timeseries(panel, box, width, height) {
  const { defaults, times, lines } = panel;
  const unit = defaults.unit;
  const custom = defaults.custom || {};
  const stacks = custom.stacking?.mode === "normal";
  const colours = lines.map((line, index) => colourOf(line, index, defaults));
  const legendHeight = legend(panel, box, colours);
  const below = new Array(times.length).fill(0);
  const shown = lines.map((line) => {
    const alone = line.properties["custom.stacking"]?.mode === "none";
    return line.values.map((value, at) => (stacks && !alone ? (below[at] += value ?? 0) : value));
  });
  const order = lines.map((_, index) => index);
  const stacked = order.filter((index) => stacks && lines[index].properties["custom.stacking"]?.mode !== "none");
  const top = Math.max(...shown.flatMap(known), 0);
  const limit = defaults.max ?? (top > 0 ? top * 1.08 : 1);
  const axis = { stroke: FAINT, font: "11px Liberation Sans, sans-serif", grid: { stroke: GRID, width: 1 }, ticks: { show: false } };
  const clock = (at) => new Date(at * 1000).toISOString().slice(11, 19);
  const config = {
    width: width - 8, height: height - legendHeight - 34, legend: { show: false }, cursor: { show: false },
    padding: [8, 10, 0, 4],
    scales: { x: { time: false, range: [data.start, data.end] }, y: { range: [0, limit] } },
    axes: [
      { ...axis, space: 72, size: 24, values: (_, ticks) => ticks.map(clock), incrs: [10, 15, 30, 60, 120, 300, 600] },
      { ...axis, size: 72, space: 34, ...(unit === "bytes" ? { incrs: POWERS } : {}), values: (_, ticks) => ticks.map((tick) => format(tick, unit)) },
    ],
    // Each area ends where the one below it does.
    bands: stacked.slice(1).map((index, place) => ({ series: [index + 1, stacked[place] + 1] })),
    series: [{}, ...order.map((index) => {
      const dash = lines[index].properties["custom.lineStyle"]?.dash;
      const opacity = lines[index].properties["custom.fillOpacity"] ?? custom.fillOpacity ?? 0;
      const alpha = Math.round(opacity * 2.55).toString(16).padStart(2, "0");
      return {
        stroke: colours[index], width: custom.lineWidth ?? 1, dash, points: { show: lines[index].values.length < 3 },
        fill: opacity ? colours[index] + alpha : undefined, spanGaps: false,
      };
    })],
  };
  const holder = element(box, "div");
  new uPlot(config, [times, ...order.map((index) => shown[index])], holder);
}

function legend(panel, box, colours) {
  const { options, lines, defaults } = panel;
  const holder = element(box, "div", "legend");
  const calcs = options.legend?.calcs || [];
  if (options.legend?.displayMode !== "table") {
    lines.forEach((line, index) => {
      const item = element(holder, "span", "item");
      element(item, "i").style.background = colours[index];
      item.append(line.name);
    });
    return holder.getBoundingClientRect().height;
  }
  const table = element(holder, "table");
  const head = element(table, "tr");
  element(head, "th", "", "Name");
  calcs.forEach((calc) => element(head, "th", "", CALCS[calc][0]));
  lines.forEach((line, index) => {
    const row = element(table, "tr");
    const name = element(row, "td");
    element(name, "i").style.background = colours[index];
    name.append(line.name);
    calcs.forEach((calc) => {
      const text = known(line.values).length ? format(CALCS[calc][1](line.values), defaults.unit) : "no data";
      element(row, "td", "", text);
    });
  });
  return holder.getBoundingClientRect().height;
}

function stat(panel, box, width, height) {
  const { lines, defaults } = panel;
  const holder = element(box, "div", "stat");
  const paint = (value) => (defaults.color?.mode === "thresholds" ? byThreshold(value, defaults) : colour(defaults.color?.fixedColor || "blue"));
  const value = element(holder, "div", "value");
  const longest = Math.max(...lines.map((line) => format(last(line.values), defaults.unit).length));
  value.style.fontSize = lines.length > 1 ? "27px" : longest > 7 ? "28px" : "33px";
  if (lines.length > 1) value.style.paddingTop = "12px";
  lines.forEach((line) => {
    const now = last(line.values);
    const part = element(value, "div", "pair");
    if (lines.length > 1) element(part, "div", "name", line.name);
    element(part, "div", "", format(now, defaults.unit)).style.color = now === null ? COLOURS.text : paint(now);
  });
  const values = lines[0]?.values || [];
  const most = defaults.max ?? Math.max(...known(values), 1e-9);
  const low = 44;
  const context = canvas(holder, width, low);
  const x = (at) => ((panel.times[at] - data.start) / (data.end - data.start)) * width;
  const y = (v) => low - 2 - (Math.min(v, most) / most) * (low - 6);
  const stroke = paint(last(known(values)) ?? 0);
  let run = [];
  const flush = () => {
    if (run.length > 1) {
      context.beginPath();
      run.forEach(([px, py], index) => (index ? context.lineTo(px, py) : context.moveTo(px, py)));
      context.strokeStyle = stroke; context.lineWidth = 1.5; context.stroke();
      context.lineTo(last(run)[0], low); context.lineTo(run[0][0], low);
      context.fillStyle = stroke + "26"; context.fill();
    }
    run = [];
  };
  values.forEach((v, at) => (v === null ? flush() : run.push([x(at), y(v)])));
  flush();
}

// Where Grafana's "Spectral" goes from few to many.
const SPECTRAL = ["#5e4fa2", "#3288bd", "#66c2a5", "#abdda4", "#e6f598", "#fee08b", "#fdae61", "#f46d43", "#d53e4f", "#9e0142"];

function heatmap(panel, box, width, height) {
  const bound = (line) => (line.labels.le === "+Inf" ? Infinity : Number(line.labels.le));
  const lines = [...panel.lines].sort((a, b) => bound(a) - bound(b));
  const counts = lines.map((line, index) => line.values.map((value, at) => Math.max(0, (value ?? 0) - (index ? lines[index - 1].values[at] ?? 0 : 0))));
  const filled = counts.map((row, index) => (row.some((count) => count > 1e-9) ? index : -1)).filter((index) => index >= 0);
  const first = Math.max(0, Math.min(...filled) - 1), end = Math.min(lines.length - 1, Math.max(...filled) + 1);
  const left = 72, high = height - 64;
  const context = canvas(box, width - 8, height - 34);
  context.font = "11px Liberation Sans, sans-serif";
  const most = Math.max(...counts.flat());
  const cell = high / (end - first + 1);
  const x = (at) => left + ((at - data.start) / (data.end - data.start)) * (width - left - 20);
  const step = x(data.start + (panel.times[1] - panel.times[0])) - x(data.start);
  for (let index = first; index <= end; index += 1) {
    const top = 6 + high - (index - first + 1) * cell;
    counts[index].forEach((count, at) => {
      if (count <= 1e-9) return;
      context.fillStyle = SPECTRAL[Math.min(SPECTRAL.length - 1, Math.floor(Math.sqrt(count / most) * SPECTRAL.length))];
      context.fillRect(x(panel.times[at]), top + 0.5, Math.max(1, step - 0.5), cell - 1);
    });
    context.fillStyle = FAINT; context.textAlign = "right";
    context.fillText(Number.isFinite(bound(lines[index])) ? format(bound(lines[index]), panel.defaults.unit) : "+Inf", left - 8, top + 4);
  }
  context.textAlign = "center";
  for (let at = Math.ceil(data.start / 30) * 30; at < data.end; at += 30) {
    context.fillText(new Date(at * 1000).toISOString().slice(11, 19), x(at), high + 24);
  }
}

function states(panel, box, width, height) {
  const names = panel.defaults.mappings[0].options;
  const context = canvas(box, width - 8, height - 40);
  context.font = "12px Liberation Sans, sans-serif";
  const left = 140, high = (height - 60) / panel.lines.length;
  const x = (at) => left + ((at - data.start) / (data.end - data.start)) * (width - left - 20);
  panel.lines.forEach((line, index) => {
    const top = 4 + index * high;
    context.fillStyle = FAINT; context.textAlign = "right"; context.fillText(line.name, left - 8, top + high / 2);
    line.values.forEach((value, at) => {
      const state = names[String(value)];
      if (!state) return;
      context.fillStyle = colour(state.color) + "cc";
      context.fillRect(x(panel.times[at]), top, x(panel.times[at + 1] ?? data.end) - x(panel.times[at]) + 0.6, high * 0.8);
    });
  });
}

function bars(panel, box, width) {
  const most = Math.max(...panel.lines.map((line) => last(line.values) ?? 0));
  panel.lines.forEach((line, index) => {
    const bar = element(box, "div", "bar");
    element(bar, "span", "", line.name);
    const body = element(bar, "div");
    body.style.width = `${((last(line.values) ?? 0) / most) * (width - 260)}px`;
    body.style.background = colourOf(line, index, panel.defaults);
    element(bar, "b", "", format(last(line.values), panel.defaults.unit));
  });
}

function facts(panel, box) {
  const table = element(box, "table", "facts");
  const head = element(table, "tr");
  panel.table.columns.forEach((column) => element(head, "th", "", column.name));
  panel.table.rows.forEach((cells) => {
    const row = element(table, "tr");
    cells.forEach((cell, index) => element(row, "td", "", format(cell, panel.table.columns[index].unit)));
  });
}

const KINDS = { timeseries, stat, heatmap, "state-timeline": states, bargauge: bars, table: facts };

document.querySelector("#head b").textContent = data.title;
document.querySelector("#head span").textContent = data.facts;
document.querySelector("#head div").textContent = data.note;
const column = (document.body.clientWidth - 16) / 24;
for (const row of data.rows) element(document.body, "div", "row", row.title).style.top = `${data.head + row.y * data.unit}px`;
for (const panel of data.panels) {
  const box = element(document.body, "div", "panel");
  const { x, y, w, h } = panel.place;
  const width = w * column - 8, height = h * data.unit - 8;
  Object.assign(box.style, { left: `${12 + x * column}px`, top: `${data.head + y * data.unit}px`, width: `${width}px`, height: `${height}px` });
  element(box, "div", "title", panel.title);
  KINDS[panel.kind](panel, box, width, height);
}
