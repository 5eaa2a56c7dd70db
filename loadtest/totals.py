"""What a locust run amounts to, in the form in which `sluice bench` tells it.

Samples are kept as counts in buckets 1 % apart, so that a run of a day needs no more memory than one of a minute, and
what the workers of a distributed run send their master is small.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from server.bench.record import Record
from server.bench.report import Level
from server.bench.stats import Distribution

BUCKET = math.log(1.01)
SHORTEST = 1e-6  # seconds; what is shorter counts as this
WALL_CLOCK = time.time() - time.perf_counter()  # added to a record's times, it compares them between processes


@dataclass(slots=True)
class Samples:
    """Seconds. Quantiles are right to 0.5 %, `total`, `count` and `longest` exactly."""

    buckets: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: npt.ArrayLike) -> None:
        values = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
        if not values.size:
            return
        places = np.floor(np.log(np.maximum(values, SHORTEST)) / BUCKET).astype(np.int64)
        self.buckets.update(places.tolist())
        self.count += values.size
        self.total += float(values.sum())
        self.longest = max(self.longest, float(values.max()))

    def merge(self, other: Samples) -> None:
        self.buckets.update(other.buckets)
        self.count += other.count
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    def distribution(self) -> Distribution | None:
        """None where there are no samples."""
        if not self.count:
            return None
        p50, p95, p99 = (self._quantile(share) for share in (0.5, 0.95, 0.99))
        return Distribution(self.count, self.total / self.count, p50, p95, p99, self.longest)

    def _quantile(self, share: float) -> float:
        rank, seen = share * self.count, 0
        for place in sorted(self.buckets):
            seen += self.buckets[place]
            if seen >= rank:
                return min(math.exp((place + 0.5) * BUCKET), self.longest)
        return self.longest

    def dump(self) -> list[Any]:
        """In types that any serializer knows."""
        return [list(self.buckets.items()), self.count, self.total, self.longest]

    @classmethod
    def load(cls, dumped: Sequence[Any]) -> Samples:
        buckets, count, total, longest = dumped
        return cls(Counter({int(place): n for place, n in buckets}), count, total, longest)


SAMPLES = ("ttft", "inter_token", "chunk_gap", "e2e", "send_delay")


@dataclass(slots=True)
class Kind:
    """The requests of one kind. Those that failed are counted and named, and add nothing else."""

    samples: dict[str, Samples] = field(default_factory=lambda: {name: Samples() for name in SAMPLES})
    counts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        self.counts["requests"] += 1
        if record.failure is not None:
            self.failures[record.failure] += 1
            return
        assert record.sent is not None
        assert record.e2e is not None
        self.counts["output_tokens"] += record.output_tokens
        self.counts["input_tokens"] += record.prompt_tokens or 0
        self.counts["cached_tokens"] += record.cached_tokens or 0
        if record.arrivals:
            self.counts["chunks"] += len(record.arrivals)
            self.counts["streamed_tokens"] += record.output_tokens
        self.counts["uncounted"] += record.completion_tokens is None
        if record.ttft is not None:
            self.samples["ttft"].add(record.ttft)
        self.samples["inter_token"].add(record.inter_token())
        self.samples["chunk_gap"].add(record.chunk_gaps())
        self.samples["e2e"].add(record.e2e)
        self.samples["send_delay"].add(record.sent - record.intended)

    def merge(self, other: Kind) -> None:
        for name, samples in other.samples.items():
            self.samples[name].merge(samples)
        self.counts.update(other.counts)
        self.failures.update(other.failures)


@dataclass(slots=True)
class Totals:
    """All requests of a run.

    first_sent, last_ended: seconds since the epoch, of requests that ended in whatever way.
    given_up: requests that the end of the run cut short; they count nowhere else.
    cpu_seconds: that the clients used.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    first_sent: float = math.inf
    last_ended: float = -math.inf
    given_up: int = 0
    cpu_seconds: float = 0.0

    def add(self, kind: str, record: Record) -> None:
        assert record.sent is not None
        assert record.ended is not None
        self.kinds.setdefault(kind, Kind()).add(record)
        self.first_sent = min(self.first_sent, record.sent + WALL_CLOCK)
        self.last_ended = max(self.last_ended, record.ended + WALL_CLOCK)

    def merge(self, other: Totals) -> None:
        for name, kind in other.kinds.items():
            self.kinds.setdefault(name, Kind()).merge(kind)
        self.first_sent = min(self.first_sent, other.first_sent)
        self.last_ended = max(self.last_ended, other.last_ended)
        self.given_up += other.given_up
        self.cpu_seconds += other.cpu_seconds

    def dump(self) -> dict[str, Any]:
        """In types that any serializer knows."""
        return {
            "kinds": {
                name: [
                    {sample: samples.dump() for sample, samples in kind.samples.items()},
                    dict(kind.counts),
                    dict(kind.failures),
                ]
                for name, kind in self.kinds.items()
            },
            "times": [self.first_sent, self.last_ended, self.cpu_seconds],
            "given_up": self.given_up,
        }

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> Totals:
        kinds = {
            name: Kind({key: Samples.load(value) for key, value in samples.items()}, Counter(counts), Counter(failures))
            for name, (samples, counts, failures) in dumped["kinds"].items()
        }
        first_sent, last_ended, cpu_seconds = dumped["times"]
        return cls(kinds, first_sent, last_ended, dumped["given_up"], cpu_seconds)

    def levels(self) -> list[Level]:
        """All requests first, then each kind where there are several."""
        everything = Kind()
        for kind in self.kinds.values():
            everything.merge(kind)
        levels = [self._level("all", everything)]
        if len(self.kinds) > 1:
            levels += [self._level(name, kind) for name, kind in sorted(self.kinds.items())]
        return levels

    def _level(self, name: str, kind: Kind) -> Level:
        seconds = max(0.0, self.last_ended - self.first_sent) if self.kinds else 0.0
        per_second = 1.0 / seconds if seconds else 0.0
        counts = kind.counts
        return Level(
            load=name,
            requests=counts["requests"],
            failures=kind.failures.total(),
            failure_kinds=dict(kind.failures.most_common()),
            seconds=seconds,
            output_tokens=counts["output_tokens"],
            input_tokens=counts["input_tokens"],
            cached_tokens=counts["cached_tokens"],
            output_tokens_per_s=counts["output_tokens"] * per_second,
            input_tokens_per_s=counts["input_tokens"] * per_second,
            requests_per_s=(counts["requests"] - kind.failures.total()) * per_second,
            ttft=kind.samples["ttft"].distribution(),
            inter_token=kind.samples["inter_token"].distribution(),
            chunk_gap=kind.samples["chunk_gap"].distribution(),
            e2e=kind.samples["e2e"].distribution(),
            send_delay=kind.samples["send_delay"].distribution(),
            tokens_per_chunk=counts["streamed_tokens"] / counts["chunks"] if counts["chunks"] else None,
            uncounted=counts["uncounted"],
            client_cpu=self.cpu_seconds * per_second if name == "all" else 0.0,
        )
