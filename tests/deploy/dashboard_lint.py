"""What can be wrong with a dashboard before it meets any data: its form, and whether its queries can ever be true.

`Exported` knows what a server exports; `problems` reads a dashboard's JSON and says each fault in a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

TARGET_LABELS = {"job", "instance"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"s", "bytes", "percentunit", "none", "reqps", "ops", "si:tok", "si:tok/s"}
CHOSEN = {"model_name": "$model", "instance": "$instance"}
Json = dict[str, Any]


@dataclass(slots=True)
class Metric:
    """A name as queries use it. kind: "gauge", "counter", or "bucket", "sum", "count" of a histogram."""

    kind: str
    values: dict[str, set[str]] = field(default_factory=dict)

    @property
    def labels(self) -> set[str]:
        return set(self.values)


class Exported(dict[str, Metric]):
    """What a query may ask for, by name: all in `text`, the body of GET /metrics, and what Prometheus itself adds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.families: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text):
            self.families[family.name] = set()
            for sample in family.samples:
                suffix = sample.name.removeprefix(family.name).removeprefix("_")
                kind = "counter" if family.type == "counter" else suffix or "gauge"
                metric = self.setdefault(sample.name, Metric(kind))
                self.families[family.name].add(sample.name)
                for label, value in sample.labels.items():
                    metric.values.setdefault(label, set()).add(value)
        self["up"] = Metric("gauge")


class Wrong(Exception):
    """A query that cannot be right, and why."""


class Checker:
    """Follows the labels through a query, as Prometheus would, and refuses what yields nothing or misleads."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        self.used: set[str] = set()

    def check(self, expression: str) -> set[str]:
        """The labels of the result."""
        windows = set(re.findall(r"\[[^\]]*\]", expression)) - {"[$__rate_interval]"}
        if windows:
            raise Wrong(f"window {windows.pop()} instead of $__rate_interval")
        try:
            tree = promql.parse(expression.replace("$__rate_interval", "1m"))
        except ValueError as error:
            raise Wrong(f"does not parse: {error}") from error
        return self._labels(tree)

    def _labels(self, node: object, in_numerator: bool = False) -> set[str]:
        match node:
            case promql.ParenExpr():
                return self._labels(node.expr, in_numerator)
            case promql.NumberLiteral():
                return set()
            case promql.VectorSelector():
                metric = self._selected(node)
                if metric.kind != "gauge":
                    raise Wrong(f"{node.name} is a {metric.kind}: it needs a rate")
                return metric.labels | TARGET_LABELS
            case promql.Call():
                return self._call(node, in_numerator)
            case promql.AggregateExpr():
                return self._aggregate(node, in_numerator)
            case promql.BinaryExpr():
                return self._binary(node, in_numerator)
            case _:
                raise Wrong(f"{type(node).__name__} has no place in a dashboard")

    def _selected(self, selector: Any) -> Metric:
        name = selector.name
        metric = self._exported.get(name)
        if metric is None:
            raise Wrong(f"the server does not export {name}")
        self.used.add(name)
        matchers = {matcher.name: matcher for matcher in selector.matchers.matchers}
        for label, matcher in matchers.items():
            if label in TARGET_LABELS or matcher.value == CHOSEN.get(label):
                continue
            if label not in metric.labels:
                raise Wrong(f"{name} has no label {label}")
            for value in matcher.value.split("|"):
                if value not in metric.values[label]:
                    raise Wrong(f"{name} is never {label}={value}")
        for label, variable in CHOSEN.items():
            asked = matchers[label].value if label in matchers else None
            needed = label in metric.labels | TARGET_LABELS and not (
                name == "sluice_build_info" and label == "instance"
            )
            if needed and asked != variable:
                raise Wrong(f"{name} is not limited to {label}={variable}")
        return metric

    def _call(self, call: Any, in_numerator: bool) -> set[str]:
        name, arguments = call.func.name, call.args
        if name in ("rate", "increase"):
            if not isinstance(arguments[0], promql.MatrixSelector):
                raise Wrong(f"{name} of a subquery: sums come after rates")
            selector = arguments[0].vector_selector
            metric = self._selected(selector)
            if metric.kind == "gauge":
                raise Wrong(f"{name} of {selector.name}, a gauge")
            if metric.kind == "sum" and not in_numerator:
                raise Wrong(f"{selector.name} without its count: that is work a second, not a duration or a size")
            return metric.labels | TARGET_LABELS
        if name == "histogram_quantile":
            labels = self._labels(arguments[1])
            if "le" not in labels:
                raise Wrong("histogram_quantile without le")
            return labels - {"le"}
        if name in ("vector", "time"):
            return set()
        raise Wrong(f"{name}() is unknown to this check")

    def _aggregate(self, aggregate: Any, in_numerator: bool) -> set[str]:
        how, inside = str(aggregate.op), aggregate.expr
        if how not in ("sum", "min", "max", "count"):
            raise Wrong(f"{how} over instances: an idle one counts as much as a busy one")
        if how == "sum" and isinstance(inside, promql.VectorSelector) and inside.name.endswith("_ratio"):
            raise Wrong(f"a sum of {inside.name}, a ratio")
        labels = self._labels(inside, in_numerator)
        kept = set(aggregate.modifier.labels) if aggregate.modifier else set()
        if kept - labels:
            raise Wrong(f"{how} by {sorted(kept - labels)}, which what it sums does not have")
        return kept

    def _binary(self, binary: Any, in_numerator: bool) -> set[str]:
        how = str(binary.op)
        left = self._labels(binary.lhs, in_numerator or how == "/")
        right = self._labels(binary.rhs)
        if isinstance(binary.lhs, promql.NumberLiteral) or _scalar(binary.lhs):
            return right
        if isinstance(binary.rhs, promql.NumberLiteral) or _scalar(binary.rhs):
            return left
        matching = binary.modifier.matching if binary.modifier else None
        if matching is None:
            keys = left, right
        elif matching.type == promql.LabelModifierType.Include:
            if set(matching.labels) - left & right:
                raise Wrong(f"{how} on {sorted(set(matching.labels) - left & right)}, which one side does not have")
            keys = set(matching.labels), set(matching.labels)
        else:
            keys = left - set(matching.labels), right - set(matching.labels)
        if how != "or" and keys[0] != keys[1]:
            raise Wrong(f"the sides of {how} differ in {sorted(keys[0] ^ keys[1])}: they never match")
        many = binary.modifier and binary.modifier.card != promql.VectorMatchCardinality.OneToOne
        return left if many or how in ("and", "or", "unless") else keys[0]


def _scalar(node: object) -> bool:
    return isinstance(node, promql.Call) and node.func.name == "time"


def queries(dashboard: Json) -> Iterator[tuple[str, Json, Json]]:
    """Where it is, the panel and the target, of each query."""
    for panel in dashboard["panels"]:
        for query in panel.get("targets", []):
            yield f"{panel.get('title')!r} {query.get('refId')}", panel, query


def used_metrics(dashboard: Json, exported: Exported) -> set[str]:
    """The names of all metrics that panels and annotations ask for."""
    checker = Checker(exported)
    for _, _, query in queries(dashboard):
        checker.check(query["expr"])
    for annotation in dashboard["annotations"]["list"]:
        if not annotation["expr"].startswith("ALERTS"):
            checker.check(annotation["expr"])
    return checker.used


def problems(dashboard: Json, exported: Exported, *, per_instance: bool) -> list[str]:
    """All faults. per_instance: each query is to keep the label instance; else none but a table's may."""
    return [*_frame(dashboard), *_panels(dashboard), *_queries(dashboard, exported, per_instance)]


def _frame(dashboard: Json) -> Iterator[str]:
    if not re.fullmatch(r"[a-z-]{1,40}", dashboard.get("uid") or ""):
        yield "no uid of its own"
    if "id" in dashboard:
        yield "an id, which is the database's to give"
    if "__inputs" in dashboard:
        yield "__inputs left over from an export"
    wanted = {"graphTooltip": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"}}
    for key, value in wanted.items():
        if dashboard.get(key) != value:
            yield f"{key} is {dashboard.get(key)}, not {value}"
    if not dashboard.get("tags") or not dashboard.get("links"):
        yield "no tags, or no link to the other dashboard"
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    if list(variables) != ["datasource", "model", "instance"] or variables["datasource"]["type"] != "datasource":
        yield f"the variables are {list(variables)}"
    for name, variable in variables.items():
        if variable["type"] == "query" and variable.get("datasource") != DATASOURCE:
            yield f"variable {name}: its data source is not the variable"
        if variable["type"] == "query" and not variable["multi"]:
            yield f"variable {name}: of one value, which Grafana does not quote in a regular expression"
    for annotation in dashboard["annotations"]["list"]:
        if annotation.get("datasource") != DATASOURCE:
            yield f"annotation {annotation['name']}: its data source is not the variable"


def _panels(dashboard: Json) -> Iterator[str]:
    panels = dashboard["panels"]
    ids = [panel.get("id") for panel in panels]
    if len(set(ids)) < len(ids) or not all(ids):
        yield "ids of panels are missing or given twice"
    for one, other in combinations(panels, 2):
        if _overlap(one["gridPos"], other["gridPos"]):
            yield f"{one['title']!r} and {other['title']!r} overlap"
    for panel in panels:
        if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24:
            yield f"{panel['title']!r} is off the grid"
        if panel["type"] == "row":
            if panel.get("collapsed") or panel.get("panels"):
                yield f"row {panel['title']!r} hides its panels"
        else:
            yield from (f"{panel.get('title')!r}: {fault}" for fault in _panel(panel))


def _overlap(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


def _panel(panel: Json) -> Iterator[str]:
    if not panel.get("title"):
        yield "no title"
    description = panel.get("description") or ""
    if len(re.findall(r"[.;:]", description)) < 2 or not description.endswith("."):
        yield "no description of what it means and what to do"
    if panel.get("datasource") != DATASOURCE:
        yield "its data source is not the variable"
    if not panel.get("targets"):
        yield "no query"
    defaults = panel["fieldConfig"]["defaults"]
    if defaults.get("unit") not in UNITS:
        yield f"unit {defaults.get('unit')}"
    if panel["type"] == "timeseries":
        if defaults.get("min") != 0:
            yield "the axis does not begin at 0"
        if not panel["options"]["legend"]["showLegend"]:
            yield "no legend"
    steps = defaults.get("thresholds", {}).get("steps", [])
    if not steps:
        yield "no thresholds, which is red from 80 in any unit"
    elif len(steps) > 1 and defaults.get("color", {}).get("mode") != "thresholds":
        yield "thresholds that colour nothing"
    elif len(steps) == 1 and defaults.get("color", {}).get("mode") == "thresholds" and not defaults.get("mappings"):
        yield "coloured by thresholds without any"


def _queries(dashboard: Json, exported: Exported, per_instance: bool) -> Iterator[str]:
    checker = Checker(exported)
    for panel in dashboard["panels"]:
        letters = [query.get("refId") for query in panel.get("targets", [])]
        if len(set(letters)) < len(letters) or not all(letters):
            yield f"{panel['title']!r}: refIds are missing or given twice"
    for where, panel, query in queries(dashboard):
        if query.get("datasource") != DATASOURCE:
            yield f"{where}: its data source is not the variable"
        try:
            labels = checker.check(query["expr"])
        except Wrong as wrong:
            yield f"{where}: {wrong}"
            continue
        table = query.get("format") == "table"
        if ("instance" in labels) != (per_instance or table):
            yield f"{where}: {'sums over' if per_instance or table else 'keeps apart'} the instances"
        shown = set(re.findall(r"{{(\w+)}}", query.get("legendFormat", "")))
        if not table and shown != labels:
            yield f"{where}: the legend shows {sorted(shown)}, the series differ in {sorted(labels)}"
        yield from (f"{where}: {fault}" for fault in _unit(panel, query["expr"]))


def _unit(panel: Json, expression: str) -> Iterator[str]:
    """A quantile has the unit that its histogram's name ends in; a ratio of like things has none."""
    unit = panel["fieldConfig"]["defaults"].get("unit")
    quantile = re.search(r"histogram_quantile\(.*?_(seconds|tokens|requests)_bucket", expression, re.DOTALL)
    wanted = {"seconds": "s", "tokens": "si:tok", "requests": "none"}
    if quantile and unit != wanted[quantile[1]]:
        yield f"{quantile[1]} in the unit {unit}"
    if "_bytes{" in expression and unit != "bytes":
        yield f"bytes in the unit {unit}"
