"""Evictions, budgets and tiers of the KV cache, from the scheduler's reports to the wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from server.metrics import Metrics
from server.reports import EVICTION_CAUSES, HostReport, PoolReport
from tests.metrics.test_metrics import IDLE, MODEL, STEP, total, value

BLOCK = MODEL.block_bytes


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), "tiny")


def report(**more: object) -> PoolReport:
    return PoolReport(running=1, used_blocks=30, cached_blocks=20, free_blocks=50, **more)


def host(used: int = 12, saved: int = 40, loaded: int = 9, evicted: int = 28) -> HostReport:
    return HostReport(MODEL.host_blocks, used, saved, loaded, evicted)


def test_evictions_are_told_apart_by_cause(metrics: Metrics) -> None:
    metrics.pool.update(report(evicted_by={"prefix_lru": 7, "h2o": 4}))
    metrics.pool.update(report(evicted_by={"prefix_lru": 7, "h2o": 8, "window": 2, "sliding_window": 1}))
    metrics.pool.update(IDLE)
    found = {cause: value(metrics, "kv_cache_evicted_blocks_total", cause=cause) for cause in EVICTION_CAUSES}
    assert found == {"prefix_lru": 7, "sliding_window": 1, "h2o": 8, "window": 2}


def test_an_unknown_cause_is_not_lost(metrics: Metrics) -> None:
    with pytest.raises(KeyError, match="whim"):
        metrics.pool.update(report(evicted_by={"whim": 1}))


def test_what_budgets_keep_and_drop_counts_once_however_often_it_is_reported(metrics: Metrics) -> None:
    for dropped in (32, 32, 96):
        metrics.pool.update(report(kept_tokens={"h2o": 64, "window": 5}, dropped_tokens={"h2o": dropped}))
    assert value(metrics, "kv_budget_tokens_total", policy="h2o", outcome="kept") == 64
    assert value(metrics, "kv_budget_tokens_total", policy="h2o", outcome="dropped") == 96
    assert value(metrics, "kv_budget_tokens_total", policy="window", outcome="kept") == 5
    assert value(metrics, "kv_budget_tokens_total", policy="window", outcome="dropped") == 0


def test_a_part_of_a_step_is_observed_only_where_the_step_had_it(metrics: Metrics) -> None:
    metrics.engine.step(STEP)
    metrics.engine.step(STEP)
    assert value(metrics, "kv_compaction_seconds_count") == value(metrics, "kv_copy_seconds_count") == 0
    metrics.engine.step(replace(STEP, compaction_seconds=0.002))
    metrics.engine.step(replace(STEP, compaction_seconds=0.0, copy_seconds=0.25))
    assert value(metrics, "kv_compaction_seconds_count") == 2
    assert value(metrics, "kv_compaction_seconds_sum") == 0.002
    assert value(metrics, "kv_copy_seconds_count") == 1
    assert value(metrics, "kv_copy_seconds_sum") == 0.25
    assert value(metrics, "engine_busy_seconds_total", stage="compact") == 0.002
    assert value(metrics, "engine_busy_seconds_total", stage="copy") == 0.25


def test_bytes_are_blocks_times_what_one_takes(metrics: Metrics) -> None:
    metrics.pool.allocated(MODEL)
    assert value(metrics, "kv_cache_bytes", tier="device", state="free") == MODEL.num_blocks * BLOCK
    assert value(metrics, "kv_cache_bytes", tier="host", state="free") == MODEL.host_blocks * BLOCK
    assert total(metrics, "kv_cache_bytes") == (MODEL.num_blocks + MODEL.host_blocks) * BLOCK
    metrics.pool.update(report(host=host()))
    for state, blocks in (("used", 30), ("cached", 20), ("free", 50)):
        assert value(metrics, "kv_cache_bytes", tier="device", state=state) == blocks * BLOCK
        assert value(metrics, "kv_cache_blocks", state=state) == blocks
    for state, blocks in (("used", 12), ("free", 38)):
        assert value(metrics, "kv_cache_bytes", tier="host", state=state) == blocks * BLOCK
        assert value(metrics, "kv_cache_host_blocks", state=state) == blocks
    assert total(metrics, "kv_cache_bytes") == (MODEL.num_blocks + MODEL.host_blocks) * BLOCK


def test_copies_to_and_from_host_memory(metrics: Metrics) -> None:
    metrics.pool.allocated(MODEL)
    metrics.pool.update(report(host=host()))
    metrics.pool.update(report(host=host(used=14, saved=43, loaded=9, evicted=29)))
    assert value(metrics, "kv_cache_host_copied_blocks_total", direction="save") == 43
    assert value(metrics, "kv_cache_host_copied_blocks_total", direction="load") == 9
    assert value(metrics, "kv_cache_host_evicted_blocks_total") == 29


def test_without_host_memory_its_series_are_zero(metrics: Metrics) -> None:
    metrics.pool.allocated(replace(MODEL, host_blocks=0))
    metrics.pool.update(report())
    for name in ("blocks", "copied_blocks_total", "evicted_blocks_total"):
        assert total(metrics, f"kv_cache_host_{name}") == 0
    assert total(metrics, "kv_cache_bytes") == MODEL.num_blocks * BLOCK
    assert value(metrics, "kv_cache_bytes", tier="host", state="free") == 0
