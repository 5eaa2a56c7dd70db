"""Prometheus' text format, made fast enough for routers that ask for it every 50 milliseconds.

prometheus-client checks and escapes every name and label at every scrape, which takes 10 ms and more for 2,000 series
and holds the interpreter's lock meanwhile, which tokens wait for. Here all of a line but its number is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from server.metrics.instruments import HistogramFamily


class Exposition:
    """Writes what `collectors` hold at the moment it is asked, by one thread at a time.

    It knows counters, gauges and our histograms, without the times at which prometheus-client made them.
    """

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._heads: dict[str, str] = {}
        self._lines: dict[tuple[str, ...], str] = {}
        self._histograms: dict[tuple[str, ...], tuple[str, ...]] = {}

    def render(self) -> bytes:
        parts: list[str] = []
        for collector in self._collectors:
            if isinstance(collector, HistogramFamily):
                self._write_histogram(collector, parts)
            else:
                for family in collector.collect():
                    self._write(family, parts)
        return "".join(parts).encode()

    def _write(self, family: Metric, parts: list[str]) -> None:
        name = family.name + "_total" if family.type == "counter" else family.name
        parts.append(self._head(name, family.documentation, family.type))
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _before_number(sample.name, sample.labels.items())
            parts.append(f"{line}{_number(sample.value)}\n")

    def _write_histogram(self, family: HistogramFamily, parts: list[str]) -> None:
        parts.append(self._head(family.name, family.help, "histogram"))
        for labels, counts, total in family.read():
            key = (family.name, *labels)
            lines = self._histograms.get(key)
            if lines is None:
                lines = self._histograms[key] = _lines_of_histogram(family, labels)
            *buckets, count, sum_ = lines
            parts += [f"{line}{number}\n" for line, number in zip(buckets, counts, strict=True)]
            parts.append(f"{count}{counts[-1]}\n{sum_}{_number(total)}\n")

    def _head(self, name: str, help: str, kind: str) -> str:
        head = self._heads.get(name)
        if head is None:
            text = help.replace("\\", r"\\").replace("\n", r"\n")
            head = self._heads[name] = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        return head


def _lines_of_histogram(family: HistogramFamily, values: tuple[str, ...]) -> tuple[str, ...]:
    labels = tuple(zip(family.label_names, values, strict=True))
    return (
        *(_before_number(f"{family.name}_bucket", (*labels, ("le", bound))) for bound in family.bucket_names),
        _before_number(f"{family.name}_count", labels),
        _before_number(f"{family.name}_sum", labels),
    )


def _before_number(name: str, labels: Iterable[tuple[str, str]]) -> str:
    shown = ",".join(f'{label}="{_escape(value)}"' for label, value in sorted(labels))
    return f"{name}{{{shown}}} " if shown else f"{name} "


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
