"""When a sequence with a budget gives tokens up, and what then: its schedule, in plain loops."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.kvpool.layout import ENDLESS
from server.scheduler.budget import make_budget
from server.step import EvictionPolicy
from tests.scheduler.driver import Driver, config
from tests.scheduler.test_scheduler import prompt

POLICIES: list[EvictionPolicy] = ["h2o", "window"]


def evictions(keep: int, slack: int, num_tokens: int) -> list[int]:
    """How many tokens have been computed at each eviction of a sequence that grows to `num_tokens`, one at a time."""
    held, at = 0, []
    for computed in range(num_tokens):
        if held == keep + slack:
            at.append(computed)
            held = keep
        held += 1
    return at


@given(
    keep=st.integers(1, 14),
    length=st.integers(1, 90),
    max_tokens=st.integers(0, 30),
    size=st.integers(1, 5),
    spare=st.integers(0, 30),
    policy=st.sampled_from(POLICIES),
    neighbours=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_it_gives_up_at_the_same_tokens_whatever_the_steps_and_the_company(
    keep: int, length: int, max_tokens: int, size: int, spare: int, policy: EvictionPolicy, neighbours: int
) -> None:
    driver = Driver(config(block_size=size, num_blocks=150, max_num_seqs=4, max_num_batched_tokens=4 + size + spare))
    for seed in range(neighbours):
        driver.add(prompt(3 * seed + 1, seed), 40)
    request = driver.budgeted(prompt(length, 9), keep, policy, max_tokens)
    seen: list[int] = []
    while driver.scheduler.has_work:
        computed = request.num_computed
        driver.step()
        assert driver.plan is not None
        for compaction in driver.plan.compactions:
            seen.append(computed)
            assert compaction.keep == keep
            assert compaction.length == keep + 4 * size, "the slack is four blocks"
            assert (compaction.sinks, compaction.recent) == (min(4, keep // 2), keep // 2)
            assert compaction.policy == policy
    driver.check_outputs()
    driver.check_idle()
    assert seen == evictions(keep, 4 * size, request.max_cached_tokens)
    stats = driver.scheduler.stats()
    assert stats.dropped_tokens.get(policy, 0) == len(seen) * 4 * size
    assert stats.kept_tokens.get(policy, 0) == len(seen) * keep
    blocks = -(-(keep + 4 * size) // size) - -(-keep // size)
    assert stats.evicted_by.get(policy, 0) == len(seen) * blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_at_any_step_it_goes_on_with_the_same_tokens(policy: EvictionPolicy) -> None:
    for steps in range(1, 40):
        driver = Driver(config(max_num_batched_tokens=12))
        request = driver.budgeted(prompt(70, 1), 6, policy, 24)
        for _ in range(steps):
            driver.step()
        if request in driver.scheduler.running:
            driver.scheduler.preempt(request)
        driver.run()
        driver.check_outputs()
        driver.check_idle()


def test_attention_is_counted_once_though_a_step_fails_twice() -> None:
    """The second time it was to compute fewer tokens: those beyond have been counted all the same."""
    driver = Driver(config())
    request = driver.budgeted(prompt(100, 1), 12, "h2o", 8)
    driver.step()
    assert request.num_computed == 28
    driver.add(prompt(30, 99), 8, priority=-1)
    for count in (16, 2):
        plan = driver.scheduler.plan()
        assert plan is not None
        row = [other for other, _ in driver.scheduler._in_flight].index(request)
        assert plan.query_starts[row + 1] - plan.query_starts[row] == count
        driver.steps += 1
        driver.runner.run(plan)
        assert driver.scheduler.fail([]) == []
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_attention_is_counted_whole_after_a_shorter_step_failed() -> None:
    """What is computed again has been counted, and what follows it has not."""
    driver = Driver(config())
    request = driver.budgeted(prompt(100, 1), 12, "h2o", 8)
    driver.step()
    urgent = driver.add(prompt(45, 2), 8, priority=-1)
    driver.step()  # 16 tokens of each
    driver.fail()  # three of it, beside 29
    driver.abort(urgent)
    driver.step()
    assert request.num_computed == 47
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_blocks_that_it_gives_up_serve_others() -> None:
    driver = Driver(config(num_blocks=12, prefix_caching=False))
    driver.budgeted(prompt(40, 1), 4, "window", 60)  # at most five blocks
    driver.budgeted(prompt(40, 2), 4, "h2o", 60)
    driver.run()
    assert driver.scheduler.stats().preemptions == 0
    driver.check_outputs()


def test_it_neither_finds_nor_leaves_a_prefix() -> None:
    driver = Driver(config(num_host_blocks=8))
    same = prompt(40, 1)
    driver.add(same, 1)
    driver.run()
    cached = driver.scheduler.stats().blocks_cached
    request = driver.budgeted(same, 6, "window", 1)
    driver.run()
    assert request.num_cached == 0
    assert driver.scheduler.stats().blocks_cached == cached
    assert driver.scheduler.stats().queried_tokens == 40
    driver.check_outputs()


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 400))
def test_whoever_never_outgrows_it_has_none(keep: int, size: int, longest: int) -> None:
    budget = make_budget(keep, "h2o", size, longest)
    endless = make_budget(keep, "h2o", size)
    assert endless is not None
    assert (budget is None) == (not evictions(keep, endless.slack, longest))
    assert endless.slack % size == 0
    assert endless.slack >= max(keep / 4, 4 * size) > endless.slack - size
    assert endless.sinks + endless.recent <= keep


def test_a_budget_makes_any_length_fit() -> None:
    driver = Driver(config(num_blocks=6))
    for keep, longest in ((8, ENDLESS), (9, 24)):
        budget = make_budget(keep, "window", 4)
        assert driver.scheduler.cache.longest(budget) == longest
    assert driver.scheduler.capacity_tokens == 24
