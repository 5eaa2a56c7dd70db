"""Makes metric families with the server's prefix and the label that all of them carry."""

from __future__ import annotations

from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.registry import Collector

from server.metrics.instruments import Histogram, log_buckets, power_buckets

PREFIX = "sluice_"
LATENCY = log_buckets(0.001, 180.0)
DURATION = log_buckets(0.001, 1800.0)
GAP = log_buckets(0.0005, 10.0)
TOKENS = power_buckets(2**20)

Family = Counter | Gauge | Histogram
C = TypeVar("C", bound=Collector)


class Families:
    """Makes families, registers them and keeps them in order.

    model: the value of the label `model_name`, the first of every series.
    collectors: all of them, and whatever else is to be shown.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self.model = model
        self.collectors: list[Collector] = []
        self._registry = registry
        self._by_name: dict[str, Family] = {}

    def __getitem__(self, name: str) -> Family:
        """The family of this name, which is without the prefix. Raises KeyError."""
        return self._by_name[name]

    def add(self, collector: C) -> C:
        self._registry.register(collector)
        self.collectors.append(collector)
        return collector

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        counter = self.add(Counter(PREFIX + name, help, ("model_name", *labels), registry=None))
        self._by_name[name] = counter
        return counter

    def gauge(self, name: str, help: str, *labels: str) -> Gauge:
        gauge = self.add(Gauge(PREFIX + name, help, ("model_name", *labels), registry=None))
        self._by_name[name] = gauge
        return gauge

    def histogram(self, name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        histogram = self.add(Histogram(PREFIX + name, help, ("model_name", *labels), bounds))
        self._by_name[name] = histogram
        return histogram
