"""Makes metric families with the server's prefix and the label that all of them carry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from server.metrics.instruments import Histogram, log_buckets, power_buckets

LATENCY = log_buckets(0.001, 180.0)
DURATION = log_buckets(0.001, 1800.0)
GAP = log_buckets(0.0005, 10.0)
TOKENS = power_buckets(2**20)


class Families:
    """Makes families in `registry`; `model` is the value of the label `model_name`, the first of every series."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self.model = model
        self._registry = registry

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"sluice_{name}", help, ("model_name", *labels), registry=self._registry)

    def gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"sluice_{name}", help, ("model_name", *labels), registry=self._registry)

    def histogram(self, name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"sluice_{name}", help, ("model_name", *labels), bounds, self._registry)
