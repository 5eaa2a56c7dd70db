"""What the server tells Prometheus.

Every series carries `model_name`; each scalar gauge is one series, so that a router may read it without summing. Units
are base units and named (`_seconds`, `_bytes`, `_ratio`, `_tokens`). Counters reconcile at any time at which the engine
has taken in all that was handed to it:

    requests_received = requests + request_rejections + requests_running + requests_waiting

where `requests` counts the finished ones, whatever their end. A request here is one sequence: a body with two prompts
and n = 3 is six of them, and a body that is refused whole is one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    disable_created_metrics,
)

from server import __version__
from server.config import Objectives
from server.metrics.engine import EngineMetrics
from server.metrics.exposition import Exposition
from server.metrics.families import Families
from server.metrics.http import HttpMetrics
from server.metrics.pool import PoolMetrics
from server.metrics.requests import RequestMetrics
from server.metrics.tokens import TokenMetrics
from server.metrics.vllm import add_vllm_names
from server.reports import ENDPOINTS

_USUAL = Objectives()


class Metrics:
    """All collectors of one server, in a registry of its own, by what they are about.

    Each number has one writing thread: the HTTP loop for `http` and for requests received and rejected, both loops for
    the engine's state, else the engine's thread, or the HTTP loop once that thread has ended. A scrape holds the lock
    of one value at a time, for as long as it takes to read it. All series whose labels are known exist from the start,
    so that a rate sees their first event.

    objectives: what a request must keep to count as served well.
    compat: whose names all that has one is also shown under.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        *,
        objectives: Objectives = _USUAL,
        compat: Literal["none", "vllm"] = "none",
        endpoints: tuple[str, ...] = ENDPOINTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # doubles the series, and no one reads them
        families = Families(registry, model_name)
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            families.add(collector)
        self.requests = RequestMetrics(families, endpoints, objectives)
        self.tokens = TokenMetrics(families, clock)
        self.pool = PoolMetrics(families)
        self.engine = EngineMetrics(families)
        self.http = HttpMetrics(families)
        build = families.gauge(
            "build_info",
            "Versions of what is running; always 1.",
            "version",
            "python",
            "torch",
            "transformers",
        )
        build.labels(model_name, __version__, platform.python_version(), version("torch"), version("transformers")).set(
            1
        )
        if compat == "vllm":
            add_vllm_names(families)
        self._exposition = Exposition(families.collectors)

    def render(self) -> bytes:
        """The body of GET /metrics, in Prometheus' text format (`content_type`)."""
        return self._exposition.render()
