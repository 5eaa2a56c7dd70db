"""The instruments that prometheus-client lacks: a histogram that takes many equal values at once, a counter that
follows a total kept elsewhere, and a rate over a sliding window that no scrape disturbs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import Counter
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


class Counted(Protocol):
    """What is read of a series: observations by bucket, those above the last bound included, and the sum of values."""

    @property
    def counts(self) -> Sequence[int]: ...

    @property
    def total(self) -> float: ...


class Together:
    """Several series with the same bounds as one."""

    def __init__(self, parts: Sequence[Counted]) -> None:
        self._parts = parts

    @property
    def counts(self) -> Sequence[int]:
        return [sum(counts) for counts in zip(*(part.counts for part in self._parts), strict=True)]

    @property
    def total(self) -> float:
        return sum(part.total for part in self._parts)


class HistogramFamily(Collector):
    """Series with the same bounds, each under the values of the family's labels."""

    def __init__(self, name: str, help: str, label_names: Sequence[str], bounds: Sequence[float]) -> None:
        self.name, self.help, self.label_names, self.bounds = name, help, tuple(label_names), tuple(bounds)
        self.bucket_names = (*map(repr, self.bounds), "+Inf")
        self._series: dict[tuple[str, ...], Counted] = {}

    def add(self, series: Counted, *labels: str) -> None:
        """Have `series` shown under these label values. Raises ValueError where they are too many or too few."""
        if len(labels) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, got {labels}")
        self._series[labels] = series

    @property
    def all_series(self) -> list[Counted]:
        return list(self._series.values())

    def read(self) -> Iterable[tuple[tuple[str, ...], Sequence[int], float]]:
        """Label values, observations up to each bound and in all, and the sum of the values, for each series."""
        for labels, series in self._series.copy().items():
            total = series.total
            yield labels, tuple(accumulate(series.counts)), total

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self.name, self.help, labels=self.label_names)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.name, self.help, labels=self.label_names)
        for labels, counts, total in self.read():
            buckets = [(name, float(count)) for name, count in zip(self.bucket_names, counts, strict=True)]
            family.add_metric(labels, buckets, total)
        return [family]


class Histogram(HistogramFamily):
    """A family whose series are `Distribution`s, one for each set of label values."""

    def __init__(self, name: str, help: str, label_names: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, help, label_names, bounds)
        self._made: dict[tuple[str, ...], Distribution] = {}

    def series(self, *labels: str) -> Distribution:
        """The distribution of these label values, made empty on first use."""
        found = self._made.get(labels)
        if found is None:
            found = Distribution(self.bounds)
            self.add(found, *labels)
            self._made[labels] = found
        return found


class Total:
    """Feeds a counter from a running total kept elsewhere."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._reached = 0

    def reach(self, total: int | None) -> None:
        """The total is this now; None for no news. It never falls."""
        if total is not None and total != self._reached:
            self._counter.inc(total - self._reached)
            self._reached = total


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
        # The epochs first: `add` may take a bucket for a new epoch meanwhile, and its old count must not pass for that.
        epochs = self._epochs.copy()
        counts = self._counts.copy()
        counted = sum(count for count, epoch in zip(counts, epochs, strict=True) if oldest <= epoch <= newest)
        return counted / ((now - oldest) * self._width)
