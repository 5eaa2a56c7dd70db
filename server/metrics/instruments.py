"""The two instruments that prometheus-client lacks: a histogram that takes many equal values at once, and a rate over a
sliding window that no scrape disturbs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


def log_buckets(first: float, last: float, per_decade: int = 4) -> tuple[float, ...]:
    """Upper bounds from `first` to at least `last`, evenly spaced on a log axis and rounded to two digits.

    Four a decade (a factor of about 1.8) bound the error of an interpolated quantile to under half its value.
    """
    bounds = [first]
    step = 1
    while bounds[-1] < last:
        bounds.append(float(f"{first * 10 ** (step / per_decade):.2g}"))
        step += 1
    return tuple(bounds)


def power_buckets(last: int) -> tuple[float, ...]:
    """Upper bounds 1, 2, 4 ... `last`, a power of two."""
    return tuple(float(2**exponent) for exponent in range(last.bit_length()))


class Distribution:
    """One series of a histogram. One thread writes it; readers see each number whole, without a lock."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class Histogram(Collector):
    """A family of `Distribution`s with the same bounds, one for each set of label values."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help, self._labels, self._bounds = name, help, tuple(labels), tuple(bounds)
        self._bucket_names = [*map(repr, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def series(self, *labels: str) -> Distribution:
        """The distribution of these label values, made empty on first use."""
        if len(labels) != len(self._labels):
            raise ValueError(f"{self._name} has the labels {self._labels}, got {labels}")
        found = self._series.get(labels)
        if found is None:
            found = self._series[labels] = Distribution(self._bounds)
        return found

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._help, labels=self._labels)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, series in self._series.copy().items():
            total, running, buckets = series.total, 0, []
            for bucket, count in zip(self._bucket_names, series.counts.copy(), strict=True):
                running += count
                buckets.append((bucket, float(running)))
            family.add_metric(labels, buckets, total)
        return [family]


class WindowRate:
    """Events a second over the last `window` seconds, kept as counts in a ring of short buckets.

    Reading changes nothing, so any number of scrapers see the same rate, and it is 0 once a window has passed without
    an event. One thread writes.
    """

    def __init__(self, window: float = 5.0, buckets: int = 20, clock: Callable[[], float] = time.monotonic) -> None:
        self._width = window / buckets
        self._clock = clock
        self._counts = [0] * (buckets + 1)  # one more than the window holds: the newest is still filling
        self._epochs = [-1] * (buckets + 1)

    def add(self, count: int) -> None:
        epoch = int(self._clock() / self._width)
        slot = epoch % len(self._counts)
        if self._epochs[slot] != epoch:
            self._counts[slot], self._epochs[slot] = 0, epoch
        self._counts[slot] += count

    def rate(self) -> float:
        now = self._clock() / self._width
        newest = int(now)
        oldest = newest - len(self._counts) + 1
        counted = sum(
            count
            for count, epoch in zip(self._counts.copy(), self._epochs.copy(), strict=True)
            if oldest <= epoch <= newest
        )
        return counted / ((now - oldest) * self._width)
