"""Our text of the metrics, compared with prometheus-client's."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import Metrics
from server.metrics.exposition import Exposition
from server.metrics.instruments import Histogram
from tests.metrics.test_metrics import exercised


def parsed(text: bytes) -> list[tuple[str, str, str, dict[tuple[str, frozenset[tuple[str, str]]], float]]]:
    """Name, type and help of each family in order, and its samples."""
    return [
        (
            family.name,
            family.type,
            family.documentation,
            {(sample.name, frozenset(sample.labels.items())): sample.value for sample in family.samples},
        )
        for family in text_string_to_metric_families(text.decode())
    ]


def test_whatever_a_label_or_a_help_holds() -> None:
    disable_created_metrics()
    registry = CollectorRegistry()
    odd = 'a "quoted" \\ back\nslash, ünd {more}='
    counter = Counter("c", odd, ("of",), registry=registry)
    counter.labels(odd).inc(12345678.5)
    gauge = Gauge("g", "A gauge.", ("a", "b"), registry=registry)
    for value in (math.inf, -math.inf, 0.1 + 0.2, 1e300, -2.0, 3e6):
        gauge.labels(str(value), odd).set(value)
    plain = Gauge("plain", "Without labels.", registry=registry)
    plain.set(5)
    empty = Gauge("empty", "Without series.", ("of",), registry=registry)
    histogram = Histogram("h", odd, ("of",), (0.5, 10.0, 2e6))
    registry.register(histogram)
    histogram.series(odd).observe(3, 2)
    histogram.series("").observe(1e9)
    ours = Exposition([counter, gauge, plain, empty, histogram])
    theirs = parsed(generate_latest(registry))
    assert parsed(ours.render()) == theirs
    assert parsed(ours.render()) == theirs  # the second time from what it has kept


def test_all_of_a_server_and_what_changed_since() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, "tiny", compat="vllm", clock=lambda: 1000.0)
    for _ in range(2):
        exercised(metrics)
        metrics.tokens.generated(3)
        ours, theirs = parsed(metrics.render()), parsed(generate_latest(registry))
        ours, theirs = ([family for family in text if not _is_of_the_process(family[0])] for text in (ours, theirs))
        assert ours == theirs
        assert sum(len(samples) for *_, samples in ours) > 500


def _is_of_the_process(name: str) -> bool:
    return name.startswith(("process_", "python_"))  # these change meanwhile
