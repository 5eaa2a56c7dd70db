"""The queue, the running batch and the blocks that it holds, as the scheduler counts them."""

from __future__ import annotations

from server.metrics.cache import CacheMetrics
from server.metrics.families import Families
from server.metrics.instruments import Total
from server.reports import WAIT_REASONS, ModelReport, PoolReport


class PoolMetrics:
    """Called on the engine's thread."""

    def __init__(self, families: Families) -> None:
        model = self._model = families.model
        self._running = families.gauge("requests_running", "Requests (sequences) in the running batch.").labels(model)
        self._running_limit = families.gauge(
            "requests_running_limit", "Most requests (sequences) that may run together."
        ).labels(model)
        self._waiting = families.gauge("requests_waiting", "Requests (sequences) in the queue.").labels(model)
        self._waiting_limit = families.gauge(
            "requests_waiting_limit", "Requests (sequences) that may wait while the batch is full; more are refused."
        ).labels(model)
        by_reason = families.gauge(
            "requests_waiting_by_reason", "Requests (sequences) in the queue, by what they wait for.", "reason"
        )
        self._waiting_tokens = families.gauge(
            "requests_waiting_tokens", "Prompt tokens of the requests in the queue that have not started yet."
        ).labels(model)
        self._waiting_by = {reason: by_reason.labels(model, reason) for reason in WAIT_REASONS}
        self._usage = families.gauge(
            "kv_cache_usage_ratio",
            "Share (0 to 1) of the KV blocks that running requests hold; evictable ones are not.",
        ).labels(model)
        self._fragmentation = families.gauge(
            "kv_cache_fragmentation_ratio",
            "Share (0 to 1) of the token slots in used KV blocks that hold no token; 0 when none are used.",
        ).labels(model)
        blocks = families.gauge("kv_cache_blocks", "KV blocks by state; the states sum to the capacity.", "state")
        self._used, self._cached, self._free = (blocks.labels(model, state) for state in ("used", "cached", "free"))
        self._block_size_tokens = families.gauge("kv_cache_block_size_tokens", "Tokens that a KV block holds.").labels(
            model
        )
        self._capacity_tokens = families.gauge(
            "kv_cache_capacity_tokens", "Tokens that the pool has room for, each in all layers."
        ).labels(model)
        self._capacity = families.gauge("kv_cache_capacity_blocks", "KV blocks in the pool.").labels(model)
        self._cache_config = families.gauge(
            "cache_config_info",
            "How the KV cache is set up; always 1.",
            "block_size",
            "num_gpu_blocks",
            "kv_cache_dtype",
            "prefix_caching",
        )
        self._preempted = Total(
            families.counter(
                "preemptions_total", "Running requests sent back to the queue because the pool ran out of blocks."
            ).labels(model)
        )
        self._queried = Total(
            families.counter(
                "prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache."
            ).labels(model)
        )
        self._hit = Total(
            families.counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.").labels(model)
        )
        self._cache = CacheMetrics(families)
        self._block_size = 0  # until the pool is there

    def allocated(self, report: ModelReport) -> None:
        """The pool is there, and empty."""
        self._cache_config.labels(
            self._model,
            report.block_size,
            report.num_blocks,
            report.kv_cache_dtype,
            "true" if report.prefix_caching else "false",
        ).set(1)
        self._block_size = report.block_size
        self._block_size_tokens.set(report.block_size)
        self._capacity_tokens.set(report.num_blocks // report.num_groups * report.block_size)
        self._capacity.set(report.num_blocks)
        self._free.set(report.num_blocks)
        self._running_limit.set(report.max_num_seqs)
        self._waiting_limit.set(report.max_queued_requests)
        self._cache.allocated(report)

    def update(self, report: PoolReport) -> None:
        """The scheduler's counts after a step, or while idle; reporting the same state twice changes nothing."""
        self._running.set(report.running)
        waiting = dict.fromkeys(WAIT_REASONS, 0) | dict(report.waiting)
        self._waiting.set(sum(waiting.values()))
        self._waiting_tokens.set(report.waiting_tokens)
        for reason, count in waiting.items():
            self._waiting_by[reason].set(count)
        capacity = report.used_blocks + report.cached_blocks + report.free_blocks
        self._usage.set(report.used_blocks / capacity if capacity else 0.0)
        slots = report.used_blocks * self._block_size
        self._fragmentation.set(report.unused_slots / slots if slots else 0.0)
        self._used.set(report.used_blocks)
        self._cached.set(report.cached_blocks)
        self._free.set(report.free_blocks)
        self._preempted.reach(report.preemptions)
        self._queried.reach(report.queried_tokens)
        self._hit.reach(report.hit_tokens)
        self._cache.update(report)
