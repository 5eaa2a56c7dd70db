"""Histograms and rates, compared with counting each value."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.metrics.instruments import (
    Distribution,
    Histogram,
    HistogramFamily,
    Together,
    WindowRate,
    log_buckets,
    power_buckets,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


bounds_and_values = st.tuples(
    st.just(log_buckets(0.001, 60)),
    st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 50)), max_size=40),
)


@given(bounds_and_values)
def test_distribution_equals_counting_each_value(case: tuple[tuple[float, ...], list[tuple[float, int]]]) -> None:
    bounds, values = case
    distribution = Distribution(bounds)
    for seconds, count in values:
        distribution.observe(seconds, count)
    each = [seconds for seconds, count in values for _ in range(count)]
    for index, bound in enumerate(bounds):
        assert sum(distribution.counts[: index + 1]) == sum(seconds <= bound for seconds in each)
    assert sum(distribution.counts) == len(each)
    assert distribution.total == pytest.approx(sum(each))


@pytest.mark.parametrize(("first", "last"), [(0.0005, 10.0), (0.001, 180.0), (0.001, 1800.0)])
def test_log_buckets(first: float, last: float) -> None:
    bounds = log_buckets(first, last)
    assert bounds[0] == first
    assert bounds[-2] < last <= bounds[-1]
    assert all(1.6 < above / below < 2.0 for below, above in pairwise(bounds))
    assert power_buckets(8) == (1, 2, 4, 8)


def brute_force_rate(events: list[tuple[float, int]], now: float, window: float, width: float) -> tuple[float, float]:
    """Least and most that a rate over about `window` seconds may be, its edge being up to `width` off."""
    least = sum(count for at, count in events if at > now - window + width) / (window + width)
    most = sum(count for at, count in events if at >= now - window - width) / window
    return least, most


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40)), min_size=1, max_size=60), st.floats(0, 8))
def test_window_rate_counts_the_window_and_nothing_else(steps: list[tuple[float, int]], quiet: float) -> None:
    clock = Clock()
    rate = WindowRate(5.0, 20, clock)
    events: list[tuple[float, int]] = []
    for gap, count in steps:
        clock.now += gap
        rate.add(count)
        events.append((clock.now, count))
    clock.now += quiet
    first = rate.rate()
    least, most = brute_force_rate(events, clock.now, 5.0, 0.25)
    assert least - 1e-9 <= first <= most + 1e-9
    assert rate.rate() == first  # a second scraper sees the same
    clock.now += 6
    assert rate.rate() == 0


class Interrupted(list[int]):
    """Another thread runs `meanwhile` as soon as this has been copied."""

    meanwhile: Callable[[], None]

    def copy(self) -> list[int]:
        copied = list(self)
        self.meanwhile()
        return copied


@pytest.mark.parametrize("copied", ["_counts", "_epochs"])
def test_what_has_left_the_window_does_not_come_back_while_it_is_overwritten(copied: str) -> None:
    clock = Clock()
    rate = WindowRate(5.0, 20, clock)
    rate.add(1000)
    clock.now += 21 * 0.25  # the same place of the ring is next
    ring = Interrupted(getattr(rate, copied))
    ring.meanwhile = lambda: rate.add(1)
    setattr(rate, copied, ring)
    assert rate.rate() <= 1 / 5.0


def test_series_together_count_what_each_counts() -> None:
    ours = Histogram("seconds", "Seconds.", ("phase",), (1.0, 2.0))
    theirs = HistogramFamily("all_seconds", "Seconds.", (), ours.bounds)
    parts = [ours.series("a"), ours.series("b")]
    theirs.add(Together(parts))
    parts[0].observe(0.5, 2)
    parts[0].observe(1.5)
    parts[1].observe(9.0)
    ((labels, counts, total),) = theirs.read()
    assert (labels, counts, total) == ((), (2, 3, 4), 0.5 * 2 + 1.5 + 9.0)


def test_a_series_has_all_labels_of_its_family() -> None:
    with pytest.raises(ValueError, match="phase"):
        Histogram("seconds", "Seconds.", ("phase",), (1.0,)).series("a", "b")
