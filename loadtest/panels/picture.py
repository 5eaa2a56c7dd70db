"""The dashboard as a picture: what its queries answer, drawn in a page and photographed by a headless browser.

It is no Grafana, and says so. Places, titles, colours, stacking, limits and units are those of the dashboard's JSON.
Lines are drawn by uPlot, the library inside Grafana's own time series panel, which npm brings into a temporary folder.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtest.panels.dashboard import Dashboard, Panel, Query, substitute
from loadtest.panels.prometheus import SCRAPE_SECONDS, Series
from loadtest.panels.stage import Stage

UPLOT = "uplot@1.6.32"
PAGE = Path(__file__).with_name("page.html")
SCRIPT = Path(__file__).with_name("page.js")
WIDTH = 1600
UNIT = 38
"""Pixels: of the picture, and of a grid unit's height as Grafana has it."""
HEAD = 64
BEFORE_SECONDS = 10.0
RATE_SECONDS = 10.0 * SCRAPE_SECONDS
"""`$__rate_interval` as Grafana computes it for a range of a few minutes: more than four scrapes."""
NOTE = "Rendering of the dashboard's queries against a real Prometheus under load; not a Grafana screenshot"


class PictureError(Exception):
    """A program that draws the picture is missing or fails; the message says which."""


@dataclass(frozen=True, slots=True)
class Answer:
    query: Query
    series: list[Series]


async def draw(stage: Stage, dashboard: Dashboard, rows: Sequence[str], path: Path) -> None:
    """Write a PNG of the dashboard, its top and the rows named (all unless any is), as of when the load ended.

    Raises PictureError.
    """
    unknown = set(rows) - set(dashboard.rows.values())
    if unknown:
        raise PictureError(f"no row is called {', '.join(sorted(unknown))}: there are {list(dashboard.rows.values())}")
    start, end = stage.window.start - BEFORE_SECONDS, stage.busy_until
    places, height = _places(dashboard, rows)
    drawn = [panel for panel in dashboard.panels if id(panel) in places]
    moment = f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M} UTC"
    data = {
        "title": dashboard.title,
        "facts": f"{stage.model} · {len(stage.windows)} replicas · {moment}",
        "note": NOTE,
        "rows": [{"title": title, "y": y} for title, y in _row_places(dashboard, rows)],
        "panels": [await _panel(stage, panel, places[id(panel)], start, end) for panel in drawn],
        "start": start,
        "end": end,
        "unit": UNIT,
        "head": HEAD,
    }
    with tempfile.TemporaryDirectory() as folder:
        await _command(_program("npm", "npm"), "install", "--no-fund", "--no-audit", "--prefix", folder, UPLOT)
        page = Path(folder, "page.html")
        _write_page(page, data)
        await _command(
            _program("chromium", "chromium"),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--window-size={WIDTH},{HEAD + height * UNIT + UNIT // 4}",
            "--virtual-time-budget=5000",
            f"--screenshot={folder}/picture.png",
            page.as_uri(),
        )
        shutil.copyfile(f"{folder}/picture.png", path)


def _write_page(page: Path, data: Mapping[str, Any]) -> None:
    text = PAGE.read_text().replace("UPLOT", f"{page.parent}/node_modules/uplot/dist").replace("SCRIPT", str(SCRIPT))
    page.write_text(text.replace("DATA", json.dumps(_without_nan(data)).replace("</", "<\\/")))


def _sections(dashboard: Dashboard, rows: Sequence[str]) -> list[tuple[str | None, int, int]]:
    """Those to be drawn: title (None is the top), and from where to where in the dashboard."""
    starts = [0, *sorted(dashboard.rows)]
    bottom = max(panel.json["gridPos"]["y"] + panel.json["gridPos"]["h"] for panel in dashboard.panels)
    titles = [None, *(dashboard.rows[y] for y in sorted(dashboard.rows))]
    found = zip(titles, starts, [*starts[1:], bottom], strict=True)
    return [(title, top, end) for title, top, end in found if title is None or not rows or title in rows]


def _row_places(dashboard: Dashboard, rows: Sequence[str]) -> list[tuple[str, int]]:
    """The title of each row and its place from the top of the picture, in grid units."""
    found, y = [], 0
    for title, top, end in _sections(dashboard, rows):
        if title is not None:
            found.append((title, y))
        y += end - top
    return found


def _places(dashboard: Dashboard, rows: Sequence[str]) -> tuple[dict[int, dict[str, int]], int]:
    """Where each panel to be drawn is, by its identity, and how high the picture is, in grid units."""
    places: dict[int, dict[str, int]] = {}
    y = 0
    for _, top, end in _sections(dashboard, rows):
        for panel in dashboard.panels:
            grid = panel.json["gridPos"]
            if top <= grid["y"] < end:
                places[id(panel)] = grid | {"y": grid["y"] - top + y}
        y += end - top
    return places, y


async def _panel(stage: Stage, panel: Panel, place: Mapping[str, int], start: float, end: float) -> dict[str, Any]:
    """A panel as the page's script takes it."""
    answers = []
    for query in panel.queries:
        expression = substitute(query.expression, stage.model, ".*", RATE_SECONDS)
        series = (
            await stage.prometheus.now(expression, end)
            if query.instant
            else await stage.prometheus.over(expression, start, end)
        )
        answers.append(Answer(query, series))
    defaults = panel.json["fieldConfig"]["defaults"]
    drawn: dict[str, Any] = {
        "title": panel.title,
        "kind": panel.kind,
        "place": dict(place),
        "defaults": defaults,
        "options": panel.json.get("options") or {},
    }
    if panel.kind == "table":
        drawn["table"] = _table(panel, answers)
    else:
        times = sorted({at for answer in answers for series in answer.series for at, _ in series.samples})
        drawn["times"] = times
        drawn["lines"] = [
            {
                "name": answer.query.name(series.labels),
                "labels": dict(series.labels),
                "values": [dict(series.samples).get(at) for at in times],
                "properties": _overrides(panel, answer.query.name(series.labels)),
            }
            for answer in answers
            for series in answer.series
        ]
    return drawn


def _overrides(panel: Panel, name: str) -> dict[str, Any]:
    """What the panel says of the field of this name alone."""
    return {
        prop["id"]: prop["value"]
        for override in panel.json["fieldConfig"]["overrides"]
        if override["matcher"] == {"id": "byName", "options": name}
        for prop in override["properties"]
    }


def _table(panel: Panel, answers: Sequence[Answer]) -> dict[str, Any]:
    """The columns and rows that the panel's transformations make: its answers joined by instance, some columns renamed
    and some left out."""
    organize = next(step["options"] for step in panel.json["transformations"] if step["id"] == "organize")
    rows: dict[str, dict[str, str | float]] = {}
    for answer in answers:
        for series in answer.series:
            row = rows.setdefault(series.labels["instance"], {})
            row.update(series.labels)
            row[f"Value #{answer.query.ref}"] = series.samples[-1][1]
    hidden = {name for name, is_hidden in organize["excludeByName"].items() if is_hidden}
    columns = [name for name in dict.fromkeys(_chain(rows.values())) if name not in hidden]
    renamed = {name: organize["renameByName"].get(name) or name for name in columns}
    return {
        "columns": [
            {"name": renamed[name], "unit": _overrides(panel, renamed[name]).get("unit", "string")} for name in columns
        ],
        "rows": [[row.get(name, "") for name in columns] for _, row in sorted(rows.items())],
    }


def _chain(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    return (name for row in rows for name in row)


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN: null is no value either."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return value


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PictureError(f"{name} is not installed; on Debian: apt-get install {package}")
    return found


async def _command(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise PictureError(f"{command[0]} failed:\n{output.decode(errors='replace')[-2000:]}")
