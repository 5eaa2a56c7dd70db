"""What the KV cache gives up and why, and where its bytes are: on the model's device and in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from prometheus_client import Gauge

from server.metrics.families import Families
from server.metrics.instruments import Total
from server.reports import EVICTION_CAUSES, ModelReport, PoolReport
from server.step import EvictionPolicy


class CacheMetrics:
    """Called on the engine's thread."""

    def __init__(self, families: Families) -> None:
        model = families.model
        evicted = families.counter("kv_cache_evicted_blocks_total", "KV blocks given up, by cause.", "cause")
        self._evicted = {cause: Total(evicted.labels(model, cause)) for cause in EVICTION_CAUSES}
        budget = families.counter(
            "kv_budget_tokens_total",
            "Tokens that requests with a budget of the KV cache kept and dropped, at each compaction.",
            "policy",
            "outcome",
        )
        self._kept, self._dropped = (
            {policy: Total(budget.labels(model, policy, outcome)) for policy in get_args(EvictionPolicy)}
            for outcome in ("kept", "dropped")
        )
        nbytes = families.gauge("kv_cache_bytes", "Bytes of KV blocks by where they are and by state.", "tier", "state")
        self._device_bytes = {state: nbytes.labels(model, "device", state) for state in ("used", "cached", "free")}
        self._host_bytes = {state: nbytes.labels(model, "host", state) for state in ("used", "free")}
        host = families.gauge(
            "kv_cache_host_blocks", "KV blocks of host memory by state; used ones hold a prefix.", "state"
        )
        self._host_blocks = {state: host.labels(model, state) for state in ("used", "free")}
        copied = families.counter(
            "kv_cache_host_copied_blocks_total", "KV blocks copied to (save) and from (load) host memory.", "direction"
        )
        self._saved, self._loaded = (Total(copied.labels(model, direction)) for direction in ("save", "load"))
        self._host_evicted = Total(
            families.counter(
                "kv_cache_host_evicted_blocks_total", "KV blocks of host memory given up for newer ones."
            ).labels(model)
        )
        self._block_bytes = 0  # until the pool is there
        self._host_capacity = 0

    def allocated(self, report: ModelReport) -> None:
        """The pool is there, and empty, in host memory too."""
        self._block_bytes = report.block_bytes
        self._host_capacity = report.host_blocks
        self._show(self._device_bytes, used=0, cached=0, free=report.num_blocks)
        self._show_host(0)

    def update(self, report: PoolReport) -> None:
        """Reporting the same state twice changes nothing."""
        for totals, reached in (
            (self._evicted, report.evicted_by),
            (self._kept, report.kept_tokens),
            (self._dropped, report.dropped_tokens),
        ):
            for name, total in reached.items():
                totals[name].reach(total)
        self._show(
            self._device_bytes,
            used=report.used_blocks,
            cached=report.cached_blocks,
            free=report.free_blocks,
        )
        self._show_host(0 if report.host is None else report.host.used_blocks)
        if report.host is not None:
            self._saved.reach(report.host.saved_blocks)
            self._loaded.reach(report.host.loaded_blocks)
            self._host_evicted.reach(report.host.evicted_blocks)

    def _show_host(self, used: int) -> None:
        free = self._host_capacity - used
        self._host_blocks["used"].set(used)
        self._host_blocks["free"].set(free)
        self._show(self._host_bytes, used=used, free=free)

    def _show(self, gauges: Mapping[str, Gauge], **blocks: int) -> None:
        for state, count in blocks.items():
            gauges[state].set(count * self._block_bytes)
