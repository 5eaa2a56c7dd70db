"""Panels as these dashboards want them: every one described, in the right unit, and in the same colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, statetimeline, table
from grafana_foundation_sdk.builders import timeseries as timeseries_panel
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.queries import quantile

Panel: TypeAlias = (
    bargauge.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | table.Panel | timeseries_panel.Panel
)
Step: TypeAlias = tuple[float | None, str]

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GRAY = "#8e8e8e"
COLOURS = {
    # how requests end, what ends or refuses them
    "stop": "green",
    "ok": "green",
    "length": "blue",
    "abort": "orange",
    "error": "red",
    "failed": "red",
    "refused": "orange",
    "met": "green",
    "not met": "red",
    "disconnect": "yellow",
    "api": "blue",
    "sibling": GRAY,
    "shutdown": "purple",
    "queue_timeout": "orange",
    "deadline": "light-orange",
    "deadline_empty": "red",
    "invalid": GRAY,
    "too_long": "blue",
    "queue_full": "orange",
    "queue_tokens": "light-orange",
    "loading": "purple",
    "draining": "yellow",
    "dead": "red",
    # requests in the engine, and what they wait for
    "running": "green",
    "waiting": "yellow",
    "slots": "blue",
    "kv_blocks": "orange",
    "token_budget": "green",
    "shared_prompt": "purple",
    # blocks
    "used": "blue",
    "cached": "purple",
    "free": GRAY,
    "fullest replica": "light-orange",
    "device used": "blue",
    "device cached": "purple",
    "device free": GRAY,
    "host used": "orange",
    "host free": "light-yellow",
    # what the cache gives up, and where it goes
    "prefix_lru": "purple",
    "sliding_window": "green",
    "h2o": "orange",
    "window": "yellow",
    "h2o kept": "light-orange",
    "h2o dropped": "orange",
    "window kept": "light-yellow",
    "window dropped": "yellow",
    "save": "orange",
    "load": "green",
    "evicted from host": "red",
    # engines and targets
    "ready": "green",
    "up": "green",
    "down": "red",
    # tokens, and the steps that compute them
    "prefill": "orange",
    "decode": "blue",
    "mixed": "purple",
    "prefill p50": "light-orange",
    "decode p50": "light-blue",
    "mixed p50": "light-purple",
    "prefill p95": "orange",
    "decode p95": "blue",
    "mixed p95": "purple",
    "computed prompt": "orange",
    "cached prompt": "purple",
    "generated": "blue",
    "preemption": "red",
    # where time goes
    "queue": "yellow",
    "schedule": "purple",
    "copy": "light-orange",
    "compact": "yellow",
    "forward": "blue",
    "sample": "green",
    "detokenize": "orange",
    "idle": GRAY,
    # quantiles
    "p50": "green",
    "p95": "orange",
    "p99": "red",
    # memory
    "weights": "blue",
    "kv_cache": "purple",
    "activations_peak": "orange",
    "device_free": GRAY,
    # status codes that mean one thing each
    "200": "green",
    "429": "orange",
    "499": "yellow",
    "500": "red",
    "503": "dark-red",
}
REFERENCES = {"objective": "purple", "limit": GRAY, "capacity": GRAY, "targets": GRAY}
"""Series to compare the others with: dashed, without an area, out of any stack."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its legend. `values`: those that the legend's label takes, where they are known, for the colours."""

    expression: str
    legend: str
    values: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """What the series will be called, as far as it is known."""
        if "{{" not in self.legend:
            return [self.legend]
        before, after = self.legend.split("{{")[0], self.legend.split("}}")[-1]
        return [f"{before}{value}{after}" for value in self.values]


def quantiles(histogram: str) -> list[Query]:
    return [Query(quantile(q, histogram), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def target(query: Query, position: int) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(query.expression)
        .legend_format(query.legend)
        .ref_id("ABCDEFGH"[position])
        .datasource(DATASOURCE)
        .range()
    )


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    """Always given: Grafana's own default is red from 80, in whatever unit."""
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )


def _common(panel: Any, title: str, description: str, unit: str, width: int, height: int) -> Any:
    return (
        panel.title(title)
        .description(" ".join(description.split()))
        .datasource(DATASOURCE)
        .unit(unit)
        .span(width)
        .height(height)
        .thresholds(_thresholds([(None, "green")]))
    )


def _property(name: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=name, value=value)


def _fixed(colour: str) -> models.DynamicConfigValue:
    return _property("color", {"mode": "fixed", "fixedColor": colour})


def _paint(panel: timeseries_panel.Panel, queries: Sequence[Query]) -> None:
    for name in dict.fromkeys(name for query in queries for name in query.names):
        if name in REFERENCES:
            panel.override_by_name(
                name,
                [
                    _fixed(REFERENCES[name]),
                    _property("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
                    _property("custom.fillOpacity", 0),
                    _property("custom.stacking", {"mode": "none"}),
                ],
            )
        elif (colour := COLOURS.get(name)) is not None:
            panel.override_by_name(name, [_fixed(colour)])


def timeseries(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 8,
    height: int = 8,
    stacked: bool = False,
    most: float | None = None,
) -> timeseries_panel.Panel:
    """Lines, or areas on top of each other. The axis begins at 0 and ends at `most`, where that is known."""
    few = len(queries) <= 4 and not any("{{" in query.legend for query in queries)
    legend = common.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
    if few:
        legend.display_mode(common_models.LegendDisplayMode.TABLE).calcs(["mean", "max", "lastNotNull"])
    else:
        legend.display_mode(common_models.LegendDisplayMode.LIST).calcs([])
    panel: timeseries_panel.Panel = _common(timeseries_panel.Panel(), title, description, unit, width, height)
    panel.legend(legend).min(0)
    panel.tooltip(
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )
    panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel.draw_style(common_models.GraphDrawStyle.LINE).line_width(1 if stacked else 2)
    panel.fill_opacity(40 if stacked else 8).show_points(common_models.VisibilityMode.AUTO).span_nulls(False)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if most is not None:
        panel.max(most)
    for position, query in enumerate(queries):
        panel.with_target(target(query, position))
    _paint(panel, queries)
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    steps: Sequence[Step] = (),
    colour: str = "blue",
    most: float | None = None,
    width: int = 3,
    height: int = 4,
) -> stat.Panel:
    """The value of now over its own course. `steps`: from which value on it has which colour; else it keeps one."""
    panel: stat.Panel = _common(stat.Panel(), title, description, unit, width, height)
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    else:
        panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(colour))
    panel.min(0).reduce_options(common.ReduceDataOptions().calcs(["last"]).values(False).fields(""))
    if most is not None:
        panel.max(most)
    panel.color_mode(common_models.BigValueColorMode.VALUE).graph_mode(common_models.BigValueGraphMode.AREA)
    panel.text_mode(
        common_models.BigValueTextMode.VALUE if len(queries) == 1 else common_models.BigValueTextMode.VALUE_AND_NAME
    ).no_value("no data")
    panel.mappings(
        [
            models.SpecialValueMap(
                models.DashboardSpecialValueMapOptions(
                    match=models.SpecialValueMatch.NULL_AND_NAN,
                    result=models.ValueMappingResult(text="no data", color="text", index=0),
                )
            )
        ]
    )
    for position, query in enumerate(queries):
        panel.with_target(target(query, position))
    return panel


def red_from(panel: stat.Panel, name: str, value: float) -> stat.Panel:
    """Has the one series of this name turn red at `value`; below, it stays as plain as text."""
    steps = [{"value": None, "color": "text"}, {"value": value, "color": "red"}]
    return panel.override_by_name(
        name,
        [_property("color", {"mode": "thresholds"}), _property("thresholds", {"mode": "absolute", "steps": steps})],
    )


def heat(
    title: str, description: str, unit: str, expression: str, *, width: int = 12, height: int = 8
) -> heatmap.Panel:
    """A histogram over time. `expression`: what falls into each bucket, by `le`."""
    panel: heatmap.Panel = _common(heatmap.Panel(), title, description, unit, width, height)
    panel.calculate(False).cell_gap(1).show_legend().show_tooltip().hide_y_histogram()
    panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(common_models.AxisPlacement.LEFT))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Spectral")
        .scale(HeatmapColorScale.EXPONENTIAL)
        .exponent(0.5)
        .steps(64)
        .reverse(False)
    )
    panel.filter_values(heatmap.FilterValueRange().le(1e-9))
    panel.with_target(target(Query(expression, "{{le}}"), 0).format(PromQueryFormat.HEATMAP))
    return panel


def states(
    title: str, description: str, query: Query, names: dict[int, str], *, width: int = 24, height: int = 6
) -> statetimeline.Panel:
    """A bar for each series, its colour the state that the value stands for."""
    panel: statetimeline.Panel = _common(statetimeline.Panel(), title, description, "none", width, height)
    panel.mappings(
        [
            models.ValueMap(
                {
                    str(value): models.ValueMappingResult(text=name, color=COLOURS[name], index=index)
                    for index, (value, name) in enumerate(names.items())
                }
            )
        ]
    )
    panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    panel.merge_values(True).show_value(common_models.VisibilityMode.AUTO).row_height(0.8).fill_opacity(80)
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs([])
    )
    panel.with_target(target(query, 0))
    return panel


def bars(title: str, description: str, unit: str, query: Query, *, width: int = 8, height: int = 8) -> bargauge.Panel:
    """A bar for each series' value of now."""
    panel: bargauge.Panel = _common(bargauge.Panel(), title, description, unit, width, height)
    panel.min(0).orientation(common_models.VizOrientation.HORIZONTAL)
    panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color("blue"))
    panel.reduce_options(common.ReduceDataOptions().calcs(["last"]).values(False).fields(""))
    panel.with_target(target(query, 0).instant())
    return panel


def facts(
    title: str, description: str, expressions: Sequence[str], units: dict[str, str], *, width: int = 24, height: int = 6
) -> table.Panel:
    """A row for each instance, the labels of all queries and the values named in `units` as its columns.

    units: of a query's value by the column's name, in the order of the first so many `expressions`; the values of the
        others are of no interest.
    """
    panel: table.Panel = _common(table.Panel(), title, description, "none", width, height)
    values = [f"Value #{'ABCDEFGH'[position]}" for position in range(len(expressions))]
    shown = dict(zip(values, units, strict=False))
    for position, expression in enumerate(expressions):
        panel.with_target(target(Query(expression, ""), position).instant().format(PromQueryFormat.TABLE))
    for name, unit in units.items():
        panel.override_by_name(name, [_property("unit", unit)])
    panel.with_transformation(
        models.DataTransformerConfig(id_val="joinByField", options={"byField": "instance", "mode": "outer"})
    )
    hidden = ["Time", *(f"Time {position + 1}" for position in range(len(expressions))), *values[len(units) :]]
    panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize", options={"excludeByName": dict.fromkeys(hidden, True), "renameByName": shown}
        )
    )
    return panel
