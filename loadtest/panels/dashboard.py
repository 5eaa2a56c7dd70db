"""The committed dashboards as their panels and queries, and what Grafana would send Prometheus for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "deploy/grafana/dashboards"


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel. `instant`: asked for one moment instead of a range."""

    ref: str
    expression: str
    legend: str
    instant: bool

    def name(self, labels: Mapping[str, str]) -> str:
        """What the legend calls a series."""
        if not self.legend:
            return ", ".join(f"{key}={value}" for key, value in sorted(labels.items())) or "value"
        return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), self.legend)


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel that shows queries. `json`: all that the dashboard says of it."""

    title: str
    kind: str
    queries: tuple[Query, ...]
    json: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`rows`: the titles of its rows by their place from the top, in grid units."""

    uid: str
    title: str
    panels: tuple[Panel, ...]
    rows: Mapping[int, str]


def load(path: Path) -> Dashboard:
    """A dashboard from its file; panels within collapsed rows included."""
    model = json.loads(path.read_text())
    found = list(_flat(model["panels"]))
    return Dashboard(
        model["uid"],
        model["title"],
        tuple(_panel(panel) for panel in found if panel["type"] not in ("row", "text")),
        {panel["gridPos"]["y"]: panel["title"] for panel in found if panel["type"] == "row"},
    )


def _flat(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _flat(panel.get("panels") or [])


def _panel(panel: dict[str, Any]) -> Panel:
    queries = tuple(
        Query(target["refId"], target["expr"], target.get("legendFormat") or "", bool(target.get("instant")))
        for target in panel["targets"]
    )
    return Panel(panel["title"], panel["type"], queries, panel)


def substitute(expression: str, model: str, instance: str, rate_seconds: float) -> str:
    """The expression with Grafana's variables filled in. `model`, `instance`: regular expressions.

    rate_seconds: `$__rate_interval`, to the millisecond. Raises ValueError for a variable that is not known here.
    """
    values = {"model": model, "instance": instance, "__rate_interval": f"{round(rate_seconds * 1000)}ms"}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise ValueError(f"unknown variable ${name} in {expression}")
        return values[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::\w+)?\})", value, expression)
