"""What the blocks of requests are said to be: counts that nothing else can correct."""

from __future__ import annotations

import numpy as np

from server.kvpool.layout import EVERYTHING
from server.scheduler.budget import Budget
from server.scheduler.cache import Cache
from server.scheduler.request import Request
from tests.scheduler.driver import GREEDY, Driver, config


def test_an_eviction_that_is_never_done_is_not_counted() -> None:
    cache = Cache(16, 4, (EVERYTHING,), 8, prefix_caching=False, num_host_blocks=0, reserve=False)
    budget = Budget(8, 8, "window")
    requests = [Request(name, list(range(30)), GREEDY, 4, budget=budget) for name in "ab"]
    for request in requests:
        assert cache.admit(request, 0)
        request.num_computed = budget.most
        assert cache.extend(request, 1)
    cache.release(requests[0])  # preempted before the plan is made

    (compaction,) = cache.take_chores().compactions
    assert (compaction.length, compaction.keep) == (16, 8)
    assert (cache.kept_tokens["window"], cache.dropped_tokens["window"], cache.evicted_by["window"]) == (8, 8, 2)


def test_whoever_is_over_still_tells_what_its_budget_made_it_give_up() -> None:
    driver = Driver(config(num_blocks=16, block_size=4))
    request = Request("r", np.arange(40).tolist(), GREEDY, 4, budget=Budget(8, 8, "window"))
    driver.scheduler.add(request)
    while (plan := driver.scheduler.plan()) is not None:
        driver.scheduler.commit(driver.runner.run(plan), plan)
    held = request.max_cached_tokens - request.num_evicted
    assert 8 < held <= 16
    assert sum(driver.scheduler.stats().dropped_tokens.values()) == request.num_evicted == 32
