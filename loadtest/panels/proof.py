"""Asks Prometheus what each panel shows, and says what is wrong with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest.panels.dashboard import Dashboard, Panel, Query, substitute
from loadtest.panels.prometheus import SCRAPE_SECONDS, PrometheusError, Series
from loadtest.panels.stage import Stage, Window
from loadtest.panels.truth import ALL, Expected

RATE_SECONDS = 4.0 * SCRAPE_SECONDS
"""Grafana's `$__rate_interval`: four scrapes."""
MARGIN_SECONDS = 3.0
EXACT = 0.001
"""Relative: a window that ends on the samples of one replica, and starts a millisecond before them."""
MAY_BE_EMPTY: frozenset[tuple[str, str]] = frozenset()
"""(uid, title) of the panels that this load cannot fill: none."""
MAY_STAY_ZERO = {
    ("sluice", "Garbage found"): "a server that leaves no cycles behind is a good one",
}
"""(uid, title) of the panels on which nothing but zeros is no fault, and why."""


@dataclass(slots=True)
class Line:
    """One series of a panel. `whole`: its value where the whole load is one rate interval."""

    name: str
    course: Series
    whole: float | None = None
    expected: Expected | None = None

    @property
    def last(self) -> float:
        return self.course.finite[-1] if self.course.finite else math.nan

    @property
    def peak(self) -> float:
        return max(self.course.finite, default=math.nan)


@dataclass(slots=True)
class Shown:
    """What a panel shows: the lines of each query, and what is wrong with them."""

    dashboard: Dashboard
    panel: Panel
    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def where(self) -> tuple[str, str]:
        return self.dashboard.uid, self.panel.title


async def prove(stage: Stage, dashboard: Dashboard, panels: Sequence[Panel] | None = None) -> list[Shown]:
    """Each of the panels (all unless given) with its problems; a dashboard that is right has none."""
    return [await _prove(stage, dashboard, panel) for panel in panels or dashboard.panels]


async def _prove(stage: Stage, dashboard: Dashboard, panel: Panel) -> Shown:
    shown = Shown(dashboard, panel)
    for query in panel.queries:
        try:
            await _ask(stage, shown, query)
        except PrometheusError as error:
            shown.problems.append(f"{query.ref}: {error}")
    shown.problems.extend(_looks_wrong(shown))
    return shown


async def _ask(stage: Stage, shown: Shown, query: Query) -> None:
    whole = await _whole(stage, query, ".*", stage.window)
    if query.instant:
        course = await stage.prometheus.now(
            substitute(query.expression, stage.model, ".*", RATE_SECONDS), stage.window.end
        )
    else:
        course = await stage.prometheus.over(
            substitute(query.expression, stage.model, ".*", RATE_SECONDS),
            stage.window.start - MARGIN_SECONDS,
            stage.window.end + MARGIN_SECONDS,
        )
    lines = [Line(query.name(series.labels), series, whole.get(query.name(series.labels))) for series in course]
    shown.lines += lines
    if not lines and shown.where not in MAY_BE_EMPTY:
        shown.problems.append(f"{query.ref}: no series")
    for name, count in Counter(line.name for line in lines).items():
        if count > 1:
            shown.problems.append(f"{query.ref}: {count} series are called {name!r}")
    if shown.dashboard.uid == "sluice":
        await _compare_sum(stage, shown, query, lines, whole)
    elif not query.instant:
        await _compare_replicas(stage, shown, query, lines)


async def _whole(stage: Stage, query: Query, instance: str, window: Window) -> dict[str, float]:
    """The query's value by the series' name when `window` is one rate interval: a millisecond more than one, so that
    Prometheus counts the first sample in whether or not it takes intervals to be open."""
    expression = substitute(query.expression, stage.model, instance, window.seconds + 0.001)
    found = await stage.prometheus.now(expression, window.end)
    return {query.name(series.labels): series.samples[-1][1] for series in found}


async def _compare_sum(
    stage: Stage, shown: Shown, query: Query, lines: Sequence[Line], whole: Mapping[str, float]
) -> None:
    """The sum over the replicas, and each replica alone as `$instance` chooses it, with what the clients counted."""
    expected = _of_query(stage.truth.summed(), shown, query, lines)
    for name, bounds in expected.items():
        shown.problems.extend(_compare(name, bounds, lines, whole, stage.window, _tolerance(stage.window)))
    for line in lines:
        line.expected = expected.get(line.name)
    for instance, window in stage.windows.items():
        alone = await _whole(stage, query, instance, window)
        for name, bounds in _of_query(stage.truths[instance].summed(), shown, query, lines).items():
            if bounds.how in ("total", "overall"):
                problems = _compare(name, bounds, (), alone, window, EXACT)
                shown.problems.extend(f"{instance} alone: {problem}" for problem in problems)


async def _compare_replicas(stage: Stage, shown: Shown, query: Query, lines: Sequence[Line]) -> None:
    """Each replica's line with what its own clients counted."""
    if {line.name for line in lines} != set(stage.windows):
        shown.problems.append(f"{query.ref}: its series are {sorted({line.name for line in lines})}, not the replicas")
        return
    for instance, window in stage.windows.items():
        bounds = stage.truths[instance].of_replica().get(shown.panel.title)
        if bounds is not None:
            alone = await _whole(stage, query, instance, window)
            shown.problems.extend(_compare(instance, bounds, lines, alone, window, EXACT))
        for line in lines:
            if line.name == instance:
                line.expected = bounds


def _of_query(
    truth: Mapping[tuple[str, str], Expected], shown: Shown, query: Query, lines: Sequence[Line]
) -> dict[str, Expected]:
    """What is known of this query: of its series, or of those that its legend names."""
    known = {name: bounds for (title, name), bounds in truth.items() if title == shown.panel.title}
    if "{{" not in query.legend:
        return {name: bounds for name, bounds in known.items() if name == query.legend}
    fixed = {other.legend for other in shown.panel.queries if "{{" not in other.legend}
    return {name: bounds for name, bounds in known.items() if name not in fixed}


def _compare(
    name: str, bounds: Expected, lines: Sequence[Line], whole: Mapping[str, float], window: Window, tolerance: float
) -> Iterator[str]:
    """The problem, if a value is out of bounds."""
    if bounds.how in ("total", "overall"):
        course = [sum(found)] if (found := [whole[key] for key in whole if name in (key, ALL)]) else []
        value = course[0] * (window.seconds if bounds.how == "total" else 1.0) if course else math.nan
    else:
        course = _course([line for line in lines if name in (line.name, ALL)])
        value = math.nan if not course else course[-1] if bounds.how == "last" else max(course)
        tolerance = EXACT  # nothing is extrapolated
    if not course:
        yield f"{name!r} shows nothing"
    elif not bounds.low * (1 - tolerance) - 1e-9 <= value <= bounds.high * (1 + tolerance) + 1e-9:
        yield f"{name!r} is {value:g} ({bounds.how}); the clients say {bounds.low:g} to {bounds.high:g}"
    elif bounds.how == "surge" and (course[0], course[-1]) != (0, 0):
        yield f"{name!r} is {course[0]:g} before the load and {course[-1]:g} after it"


def _tolerance(window: Window) -> float:
    """Relative, of a window of several replicas. They are scraped at different moments, so that the increase of each is
    extrapolated from the samples within by up to a scrape at either end."""
    return 2 * SCRAPE_SECONDS / max(SCRAPE_SECONDS, window.seconds - 2 * SCRAPE_SECONDS)


def _course(lines: Sequence[Line]) -> list[float]:
    """The finite values of the lines' sum, in order."""
    courses = [dict(line.course.samples) for line in lines]
    moments = sorted({at for course in courses for at in course})
    sums = (sum(course.get(at, 0.0) for course in courses) for at in moments)
    return [value for value in sums if math.isfinite(value)]


def _looks_wrong(shown: Shown) -> Iterator[str]:
    """What is never right, whatever the load."""
    most = shown.panel.json["fieldConfig"]["defaults"].get("max", math.inf)
    for line in shown.lines:
        if not line.course.finite:
            yield f"{line.name!r} has no value but NaN"
        elif min(line.course.finite) < 0 and shown.panel.kind != "state-timeline":  # whose numbers stand for words
            yield f"{line.name!r} is {min(line.course.finite):g}"
        elif line.peak > most * (1 + EXACT):
            yield f"{line.name!r} reaches {line.peak:g}, and the panel ends at {most:g}"
    if shown.lines and shown.where not in MAY_STAY_ZERO:
        values = [value for line in shown.lines for value in (line.peak, line.whole or 0.0)]
        if not any(value > 0 for value in values if math.isfinite(value)):
            yield "nothing but zeros"
