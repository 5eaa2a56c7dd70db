"""Fair sharing between tenants: equal shares for whoever has work waiting, nothing saved up, nobody starved."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler.fairness import INPUT_WEIGHT, OUTPUT_WEIGHT, TokenCounters
from server.scheduler.request import Request, Status
from server.step import SamplingParams
from tests.scheduler.driver import Driver, config

MAX_SEQS = 4
LONGEST_PROMPT, LONGEST_OUTPUT = 12, 10


def fair(**changes: object) -> Driver:
    values = {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 16, "prefix_caching": False, "policy": "fair"}
    return Driver(config(**(values | changes)))


class Ledger:
    """What each tenant was served, counted from outside: prompts when they start, outputs as they come."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.served: Counter[str] = Counter()

    def step(self) -> None:
        self.driver.step()
        for request in self.driver.scheduler.admitted:
            self.served[request.tenant] += INPUT_WEIGHT * (request.num_prompt - request.num_cached)
        for progress in self.driver.progress:
            self.served[progress.request.tenant] += OUTPUT_WEIGHT * (progress.token_id is not None)


class Feed:
    """A tenant who always has requests waiting, of drawn lengths."""

    def __init__(self, driver: Driver, tenant: str, lengths: list[tuple[int, int]]) -> None:
        self.driver, self.tenant, self.lengths = driver, tenant, lengths
        self.sent = 0

    def fill(self) -> None:
        waiting = sum(request.tenant == self.tenant for request in self.driver.scheduler.waiting)
        while waiting < MAX_SEQS + 1:
            prompt, output = self.lengths[self.sent % len(self.lengths)]
            self.driver.add([self.sent % 7] * prompt, output, tenant=self.tenant)
            self.sent += 1
            waiting += 1


lengths = st.lists(st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_OUTPUT)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(st.lists(lengths, min_size=2, max_size=4), st.sampled_from([64, 12]))
def test_backlogged_tenants_are_served_alike(loads: list[list[tuple[int, int]]], num_blocks: int) -> None:
    """Whatever the lengths: what two of them get over any time differs by at most twice what a batch may owe."""
    driver = fair(num_blocks=num_blocks)
    feeds = [Feed(driver, f"t{index}", load) for index, load in enumerate(loads)]
    ledger = Ledger(driver)
    bound = 2 * max(INPUT_WEIGHT * LONGEST_PROMPT, OUTPUT_WEIGHT * MAX_SEQS * LONGEST_OUTPUT)
    seen = [Counter(ledger.served)]
    for _ in range(150):
        for feed in feeds:
            feed.fill()
        ledger.step()
        seen.append(Counter(ledger.served))
    for since in seen[::10]:
        gained = [ledger.served[feed.tenant] - since[feed.tenant] for feed in feeds]
        assert max(gained) - min(gained) <= bound
    assert min(ledger.served[feed.tenant] for feed in feeds) > 0


def test_many_requests_do_not_buy_a_larger_share() -> None:
    driver = fair()
    greedy = [driver.add([1] * 8, 8, tenant="greedy") for _ in range(40)]
    driver.step()
    modest = driver.add([2] * 8, 8, tenant="modest")
    while modest.status is not Status.FINISHED:
        driver.step()
    assert sum(request.status is Status.FINISHED for request in greedy) <= 2 * MAX_SEQS
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_idleness_saves_up_nothing() -> None:
    """A tenant who comes late shares from then on; it does not catch up on what it never asked for."""
    driver = fair()
    early, late = Feed(driver, "early", [(8, 8)]), Feed(driver, "late", [(8, 8)])
    ledger = Ledger(driver)
    for _ in range(200):
        early.fill()
        ledger.step()
    before = ledger.served["early"]
    assert before > 1000
    for _ in range(100):
        early.fill()
        late.fill()
        ledger.step()
    gained = ledger.served["early"] - before
    assert abs(gained - ledger.served["late"]) <= 2 * OUTPUT_WEIGHT * MAX_SEQS * 8
    assert gained > 300


def test_the_first_to_return_is_level_with_the_last_to_leave() -> None:
    counters = TokenCounters()
    first, other = (Request("r", [1], SamplingParams(), 1, tenant=tenant) for tenant in ("a", "b"))
    counters.enter(first)
    counters.leave(first)
    counters.charge("a", input_tokens=1000)
    counters.enter(other)
    assert counters.served("b") == 1000
    counters.charge("b", output_tokens=50)
    counters.enter(first)
    assert (counters.served("a"), counters.served("b")) == (1100, 1100)


def test_who_comes_among_others_is_level_with_the_least_of_them() -> None:
    counters = TokenCounters()
    for tenant in "abc":
        counters.enter(Request(tenant, [1], SamplingParams(), 1, tenant=tenant))
    for tenant, tokens in (("a", 900), ("b", 7), ("c", 40)):
        counters.charge(tenant, input_tokens=tokens)
    counters.enter(Request("d", [1], SamplingParams(), 1, tenant="d"))
    assert counters.served("d") == 7


def test_places_that_are_free_together_are_shared_too() -> None:
    driver = fair()
    for tenant in "ab":
        for _ in range(4):
            driver.add([1] * 3, 2, tenant=tenant)
    driver.step()
    assert [request.tenant for request in driver.scheduler.admitted] == ["a", "b", "a", "b"]


def test_priority_orders_within_a_tenant_only() -> None:
    driver = fair(max_num_seqs=1)
    running = driver.add([1], 2, tenant="a")
    driver.step()
    later = driver.add([1], 2, tenant="a", priority=5)
    pushy = driver.add([1], 2, tenant="a", priority=-9)
    other = driver.add([1], 2, tenant="b", priority=9)
    driver.run()
    assert driver.finished == [running, other, pushy, later]


def test_tokens_from_the_cache_are_not_charged() -> None:
    driver = fair(prefix_caching=True)
    for _ in range(2):
        driver.add([3] * 9, 1, tenant="a")
        driver.run()
    assert driver.scheduler.counters is not None
    assert driver.scheduler.counters.served("a") == INPUT_WEIGHT * (9 + 1) + OUTPUT_WEIGHT * 2


def test_the_preempted_come_back_first() -> None:
    """Their prompt has been paid for, and the blocks they wait for were theirs."""
    driver = fair(num_blocks=8, max_num_seqs=3)
    first = [driver.add([seed] * 8, 16, SamplingParams(seed=seed), tenant="a") for seed in range(3)]
    while not any(request.num_preemptions for request in first):
        driver.step()
    victim = next(request for request in first if request.num_preemptions)
    driver.add([9], 2, tenant="b")
    assert driver.scheduler.counters is not None
    assert next(driver.scheduler.counters.in_turn()) is victim
    driver.run()
    driver.check_outputs()


def test_who_has_started_does_not_give_way_to_what_was_sent_earlier_and_starts_later() -> None:
    """A greedy tenant's backlog is older than the modest one's request, and still behind it."""
    driver = fair(num_blocks=20, max_num_seqs=8, max_num_batched_tokens=32)
    backlog = [driver.add([seed % 7] * 8, 24, SamplingParams(seed=seed), tenant="greedy") for seed in range(40)]
    driver.step()
    modest = driver.add([5] * 8, 24, tenant="modest")
    while modest.status is Status.WAITING:
        driver.step()
    running = set(driver.scheduler.running)
    while modest.status is not Status.FINISHED:
        driver.step()
        overtaken = [request for request in running if request.status is Status.RUNNING and request is not modest]
        assert not modest.num_preemptions or overtaken, "it gave way to a request that started after it"
    assert sum(request.status is Status.FINISHED for request in backlog) < 8
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_the_preempted_keep_their_place_in_the_batch() -> None:
    driver = fair(num_blocks=10, max_num_seqs=6, max_num_batched_tokens=32)
    requests = [
        driver.add([seed % 7] * 6, 20, SamplingParams(seed=seed), tenant="ab"[seed % 2], priority=-seed)
        for seed in range(12)
    ]
    started: dict[Request, tuple[int, int]] = {}
    while driver.scheduler.has_work:
        driver.step()
        for request in driver.scheduler.admitted:
            started[request] = request.order
    assert sum(request.num_preemptions for request in requests) > 3
    assert [request.order for request in requests] == [started[request] for request in requests]
    assert sorted(started.values()) == list(started.values())


def test_without_tenants_it_is_first_come_first_served() -> None:
    driver = fair()
    requests: list[Request] = [driver.add([seed] * 5, 4) for seed in range(12)]
    started: list[Request] = []
    while driver.scheduler.has_work:
        driver.step()
        started += driver.scheduler.admitted
    assert started == requests
