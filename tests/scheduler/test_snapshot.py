"""A snapshot of the cache tells each block's state and holders, whatever the scheduler is in the middle of."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from server.kvpool.layout import EVERYTHING, Visibility
from server.reports import BlockRuns, CacheSnapshot, GroupSnapshot
from server.scheduler.budget import make_budget
from server.scheduler.request import Request, Status
from server.scheduler.scheduler import Scheduler
from server.scheduler.snapshot import block_runs
from server.step import StepResult
from tests.scheduler.driver import GREEDY, Driver, config
from tests.scheduler.test_random_load import Traffic


def expand(runs: BlockRuns) -> list[int]:
    return [block for first, last in runs for block in range(first, last + 1)]


def check(scheduler: Scheduler) -> CacheSnapshot:
    """Against the pool's own books, which `check_integrity` compares with the requests."""
    snapshot = scheduler.snapshot()
    pool = scheduler.pool
    blocks = range(1, pool.capacity + 1)
    held = [[block for runs in sequence.blocks for block in expand(runs)] for sequence in snapshot.sequences]
    holders = Counter(block for own in held for block in own)
    assert [holders[block] for block in blocks] == pool._references[1:]
    assert sorted(expand(snapshot.cached)) == expand(snapshot.cached)
    assert set(expand(snapshot.cached)) == set(pool._cached)
    states = (len(holders), len(expand(snapshot.cached)), pool.num_free)
    assert (snapshot.used_blocks, snapshot.cached_blocks, snapshot.free_blocks) == states
    assert sum(states) == snapshot.capacity_blocks == scheduler.config.num_blocks
    assert snapshot.block_size == scheduler.config.block_size
    for sequence, own in zip(snapshot.sequences, held, strict=True):
        assert sequence.num_shared == sum(holders[block] > 1 for block in own)
        assert len(sequence.blocks) == len(snapshot.groups)
        assert sequence.num_computed <= sequence.num_tokens
        assert own if sequence.status != "waiting" else not own
    named = [(sequence.request_id, sequence.status) for sequence in snapshot.sequences]
    assert [entry for entry in named if entry[1] != "ended"] == [
        *((request.request_id, "running") for request in scheduler.running),
        *((request.request_id, "waiting") for request in scheduler.waiting),
    ]
    return snapshot


@pytest.mark.parametrize("changes", [{"num_blocks": 24}, {"num_blocks": 40, "prefix_caching": False}])
def test_it_agrees_with_the_pool_under_load(changes: dict[str, object]) -> None:
    driver = Driver(config(**changes))
    traffic = Traffic(driver, seed=3)
    seen: Counter[str] = Counter()

    def during() -> None:
        for request in driver.scheduler.running[::3]:
            driver.abort(request)
        seen.update(sequence.status for sequence in check(driver.scheduler).sequences)

    while driver.steps < 300:
        traffic.turn()
        driver.step(during if driver.steps % 7 == 0 else None)
        snapshot = check(driver.scheduler)
        seen["shared"] += sum(sequence.num_shared for sequence in snapshot.sequences)
        seen["cached"] += snapshot.cached_blocks
    reached = {"running", "waiting", "ended"} | ({"shared", "cached"} if driver.config.prefix_caching else set())
    assert all(seen[what] for what in reached), seen
    assert all(request.status is Status.FINISHED for request in driver.finished)


WINDOWED = (EVERYTHING, Visibility(window=8))


@pytest.mark.parametrize("changes", [{"groups": WINDOWED, "num_host_blocks": 6}, {"num_blocks": 60}])
def test_it_agrees_with_windows_host_memory_and_budgets(changes: dict[str, object]) -> None:
    """Whatever the tokens are: what a step computes is made up."""
    scheduler = Scheduler(config(**{"num_blocks": 40, **changes}))
    budget = None if "groups" in changes else make_budget(8, "h2o", 4)
    requests = [
        Request(f"r{i}", [i % 3] * 10 + [i] * (i % 5), GREEDY, 40, budget=budget if i % 2 else None) for i in range(24)
    ]
    for request in requests:
        scheduler.add(request)
    evicted = on_host = passed = 0
    while (plan := scheduler.plan()) is not None:
        check(scheduler)
        drawn = len(plan.sample_rows)
        scheduler.commit(StepResult(np.full(drawn, 3), (None,) * drawn, ()), plan)
        snapshot = check(scheduler)
        assert snapshot.groups == tuple(GroupSnapshot(group.window, group.chunk) for group in scheduler.config.groups)
        for sequence in snapshot.sequences:
            assert 0 <= sequence.num_evicted <= sequence.num_computed
            kept = sequence.num_computed - sequence.num_evicted
            assert len(expand(sequence.blocks[0])) * 4 >= kept
            for runs in sequence.blocks[1:]:
                assert len(expand(runs)) * 4 >= min(kept, 8)
                passed += len(expand(sequence.blocks[0])) - len(expand(runs))
        evicted += sum(sequence.num_evicted for sequence in snapshot.sequences)
        on_host += snapshot.host.used_blocks if snapshot.host else 0
    assert scheduler.stats().preemptions
    assert (evicted > 0) == (budget is not None)
    assert (on_host > 0, passed > 0) == (budget is None, budget is None)
    # What is said of an answer is said after its end.
    assert all((request.num_evicted > 0) == (request.budget is not None) for request in requests)


def test_runs_keep_the_order_of_the_table() -> None:
    assert block_runs([]) == ()
    assert block_runs([7, 8, 9, 3, 2, 4, 5]) == ((7, 9), (3, 3), (2, 2), (4, 5))
