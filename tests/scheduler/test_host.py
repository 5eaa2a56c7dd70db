"""What the pool gives up goes to host memory and comes back where that is faster than computing it again."""

from __future__ import annotations

import pytest

from server.kvpool.layout import EVERYTHING, Visibility
from tests.scheduler.driver import Driver, config
from tests.scheduler.test_scheduler import counts, prompt


def crowd_out(driver: Driver) -> None:
    """The pool gives up all that is only cached; the copies are made at the beginning of the next step."""
    pool = driver.scheduler.pool
    pool.release(pool.allocate(pool.num_available))


def measured(driver: Driver, copy_seconds: float, compute_seconds: float) -> None:
    """What copying a block and computing a token has taken until now."""
    driver.scheduler.cache._copy_seconds = copy_seconds
    driver.scheduler.cache._compute_seconds = compute_seconds


def loads(driver: Driver) -> int:
    assert driver.plan is not None
    return len(driver.plan.loads)


def test_a_preempted_request_goes_on_by_a_copy() -> None:
    driver = Driver(config(num_blocks=12, num_host_blocks=12, max_num_batched_tokens=64))
    request = driver.add(prompt(24, 1), 8)
    for _ in range(4):
        driver.step()
    driver.scheduler.preempt(request)
    crowd_out(driver)
    driver.step()
    assert loads(driver) == 6
    assert counts(driver) == [4], "of 28 tokens 24 were in six full blocks"
    assert driver.scheduler.stats().recomputed_tokens == 3
    driver.run()
    driver.check_outputs()
    driver.check_idle()


@pytest.mark.parametrize(("copy_seconds", "loaded"), [(None, 5), (0.5, 5), (3.9, 5), (4.1, 0), (100.0, 0)], ids=str)
def test_blocks_are_copied_back_where_that_is_faster(copy_seconds: float | None, loaded: int) -> None:
    """Five blocks of four tokens, a second each."""
    driver = Driver(config(num_blocks=12, num_host_blocks=24, max_num_batched_tokens=64))
    driver.add(prompt(20, 1), 1)
    driver.run()
    crowd_out(driver)
    if copy_seconds is None:
        driver.scheduler.cache._copy_seconds = None
    else:
        measured(driver, copy_seconds, 1.0)
    request = driver.add([*prompt(20, 1), 1], 2)
    driver.step()
    assert loads(driver) == loaded
    assert request.num_cached == 4 * loaded
    assert counts(driver) == [21 - 4 * loaded]
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_only_what_will_be_seen_is_copied_and_counts() -> None:
    """Ten blocks of text: one group needs all of them, the other the last two."""
    driver = Driver(
        config(
            num_blocks=30,
            num_host_blocks=60,
            max_num_batched_tokens=64,
            groups=(EVERYTHING, Visibility(window=6)),
        )
    )
    driver.add(prompt(40, 1), 1)
    driver.run()
    crowd_out(driver)
    measured(driver, 3.0, 1.0)  # 12 copies take 36 seconds, 20 would take 60; 40 tokens take 40
    request = driver.add([*prompt(40, 1), 1], 2)
    driver.step()
    assert loads(driver) == 12
    assert request.num_cached == 40
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_it_learns_what_copies_and_tokens_take() -> None:
    driver = Driver(config(num_blocks=12, num_host_blocks=24, max_num_batched_tokens=64))
    cache = driver.scheduler.cache
    driver.add(prompt(20, 1), 1)
    driver.run()
    assert cache._compute_seconds == pytest.approx(1.0), "the fake runner takes a second for a token"
    crowd_out(driver)
    driver.add(prompt(4, 2), 1)
    driver.run()
    assert cache._copy_seconds == pytest.approx(0.1), "and a tenth for a block"


def test_a_full_host_memory_loses_nothing_but_time() -> None:
    driver = Driver(config(num_blocks=12, num_host_blocks=7))
    for seed in (1, 1, 2, 1, 3, 2, 2):
        driver.add(prompt(20, seed), 6)
        driver.run()
        crowd_out(driver)
    host = driver.scheduler.stats().host
    assert host is not None
    assert host.used_blocks == 7
    assert host.evicted_blocks == host.saved_blocks - 7 > 0
    assert host.loaded_blocks > 0
    driver.check_outputs()
    driver.check_idle()
