"""At least 100,000 steps of random load: nothing corrupts, nothing leaks, everything finishes with the right tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from server.kvpool.layout import ENDLESS, EVERYTHING, Visibility
from server.scheduler.budget import make_budget
from server.scheduler.request import Request, Status
from server.step import SamplingParams
from tests.scheduler.alone import VOCAB_SIZE
from tests.scheduler.driver import Driver, config

WINDOW = (Visibility(window=5),)
CHUNK = (Visibility(chunk=6),)
SHORT = (Visibility(window=1), Visibility(window=2, chunk=8))
MIXED = (EVERYTHING, Visibility(window=5), Visibility(chunk=6))
STEPS = 2_280  # of each load
LOADS = {
    "roomy": {"num_blocks": 200},
    "tiny pool": {"num_blocks": 10},
    "tiny pool, no prefix cache": {"num_blocks": 10, "prefix_caching": False},
    "tiny pool, reserve": {"num_blocks": 10, "admission": "reserve"},
    "medium pool, reserve": {"num_blocks": 40, "admission": "reserve"},
    "reserve, no prefix cache": {"num_blocks": 24, "admission": "reserve", "prefix_caching": False},
    "medium pool": {"num_blocks": 24},
    "medium pool, no prefix cache": {"num_blocks": 24, "prefix_caching": False},
    "large blocks": {"num_blocks": 8, "block_size": 8, "max_num_batched_tokens": 16},
    "blocks of one token": {"num_blocks": 40, "block_size": 1, "max_num_batched_tokens": 9},
    "smallest budget": {"num_blocks": 24, "max_num_batched_tokens": 12},
    "one at a time": {"num_blocks": 12, "max_num_seqs": 1, "max_num_batched_tokens": 5},
    "one at a time, reserve": {"num_blocks": 12, "max_num_seqs": 1, "admission": "reserve"},
    "few scores a step": {"num_blocks": 24, "max_scored_tokens": 1},
    "wide": {"num_blocks": 90, "max_num_seqs": 24, "max_num_batched_tokens": 40},
    "wide, few blocks": {"num_blocks": 60, "max_num_seqs": 24, "max_num_batched_tokens": 64},
    "fair": {"num_blocks": 40, "policy": "fair"},
    "fair, tiny pool": {"num_blocks": 10, "policy": "fair"},
    "windows": {"num_blocks": 14, "groups": WINDOW},
    "windows, no step as long": {"num_blocks": 8, "groups": WINDOW, "max_num_batched_tokens": 12},
    "windows, reserve": {"num_blocks": 24, "groups": WINDOW, "admission": "reserve"},
    "windows, no prefix cache": {"num_blocks": 14, "groups": WINDOW, "prefix_caching": False},
    "windows, blocks of one token": {
        "num_blocks": 60,
        "groups": WINDOW,
        "block_size": 1,
        "max_num_batched_tokens": 10,
    },
    "chunks": {"num_blocks": 14, "groups": CHUNK},
    "next to nothing in sight": {"num_blocks": 24, "groups": SHORT, "max_num_batched_tokens": 13},
    "mixed groups": {"num_blocks": 60, "groups": MIXED},
    "mixed groups, tiny pool": {"num_blocks": 26, "groups": MIXED},
    "mixed groups, reserve": {"num_blocks": 60, "groups": MIXED, "admission": "reserve"},
    "mixed groups, fair": {"num_blocks": 40, "groups": MIXED, "policy": "fair", "max_num_batched_tokens": 15},
    "budgets": {"num_blocks": 40, "budgets": True},
    "budgets, tiny pool": {"num_blocks": 10, "budgets": True},
    "budgets, small steps": {"num_blocks": 24, "budgets": True, "max_num_batched_tokens": 12},
    "budgets, reserve": {"num_blocks": 24, "budgets": True, "admission": "reserve"},
    "budgets, blocks of one token": {
        "num_blocks": 40,
        "budgets": True,
        "block_size": 1,
        "max_num_batched_tokens": 17,
    },
    "budgets, fair": {"num_blocks": 16, "budgets": True, "policy": "fair"},
    "host memory": {"num_blocks": 10, "num_host_blocks": 40},
    "one host block": {"num_blocks": 10, "num_host_blocks": 1},
    "small host memory, blocks of one token": {
        "num_blocks": 40,
        "num_host_blocks": 12,
        "block_size": 1,
        "max_num_batched_tokens": 17,
    },
    "host memory, reserve": {"num_blocks": 12, "num_host_blocks": 20, "admission": "reserve"},
    "host memory, windows": {"num_blocks": 14, "num_host_blocks": 20, "groups": WINDOW},
    "host memory, next to nothing in sight": {
        "num_blocks": 26,
        "num_host_blocks": 20,
        "groups": SHORT,
        "max_num_batched_tokens": 17,
    },
    "host memory, mixed groups": {"num_blocks": 30, "num_host_blocks": 120, "groups": MIXED},
    "small host memory, mixed groups, fair": {
        "num_blocks": 36,
        "num_host_blocks": 5,
        "groups": MIXED,
        "policy": "fair",
    },
    "host memory, budgets": {"num_blocks": 12, "num_host_blocks": 20, "budgets": True},
}


class Traffic:
    """Draws arrivals and aborts; prompts share prefixes of a few documents. budgets: whether some have one."""

    def __init__(self, driver: Driver, seed: int, *, budgets: bool = False) -> None:
        self.driver = driver
        self.rng = random.Random(seed)
        self.longest = min(driver.scheduler.capacity_tokens, 40)
        self.budgets = budgets
        self.documents = [[self.rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(4)]
        self.open: list[Request] = []
        self.rate = driver.config.max_num_seqs / 32

    def prompt(self, longest: int) -> list[int]:
        length = self.rng.randint(1, longest)
        shared = self.rng.choice(self.documents)[: self.rng.randint(0, length)]
        return shared + [self.rng.randrange(VOCAB_SIZE) for _ in range(length - len(shared))]

    def arrive(self) -> None:
        rng = self.rng
        keep = rng.choice((None, rng.randint(1, 12))) if self.budgets else None
        policy = rng.choice(("h2o", "window"))
        longest = self.longest
        if keep is not None:
            budget = make_budget(keep, policy, self.driver.config.block_size)
            longest = 60 if self.driver.scheduler.cache.longest(budget) == ENDLESS else longest
        prompt = self.prompt(longest)
        room = longest + 1 - len(prompt)
        leader = None
        for _ in range(rng.choice((1, 1, 1, 3))):
            request = self.driver.budgeted(
                prompt,
                keep,
                policy,
                rng.choice((0, room, rng.randint(0, room))),
                SamplingParams(seed=rng.randrange(1000), stop_token_ids=frozenset(range(rng.choice((0, 1, 3))))),
                priority=rng.choice((0, 0, 0, -1, 1)) if leader is None else leader.priority,
                salt=rng.choice(("", "", "tenant")) if leader is None else leader.salt,
                prompt_logprobs=rng.choice((None, None, None, 0, 2)),
                leader=leader,
                tenant=rng.choice(("a", "a", "b", "c")) if leader is None else leader.tenant,
            )
            self.open.append(request)
            leader = leader or request

    def abort_one(self) -> None:
        request = self.rng.choice(self.open)
        if request.status is not Status.FINISHED:
            self.driver.abort(request)

    def turn(self) -> Callable[[], None] | None:
        """What happens before a step; returns what happens during it."""
        rng = self.rng
        if self.driver.steps % 64 == 0:
            self.open = [request for request in self.open if request.status is not Status.FINISHED]
        waiting = len(self.driver.scheduler.waiting)
        if not self.driver.scheduler.has_work or (waiting < 12 and rng.random() < self.rate):
            self.arrive()
        if rng.random() < 0.02:
            self.abort_one()
        return self.abort_one if rng.random() < 0.02 else None


@pytest.mark.parametrize("load", LOADS)
def test_random_load(load: str) -> None:
    changes = dict(LOADS[load])
    budgets = bool(changes.pop("budgets", False))
    driver = Driver(config(**changes), integrity_every=50)
    traffic = Traffic(driver, seed=list(LOADS).index(load), budgets=budgets)
    while driver.steps < STEPS:
        during = traffic.turn()
        if driver.scheduler.has_work and traffic.rng.random() < 0.02:
            driver.fail(traffic.rng.randrange(24), during=during)
        else:
            driver.step(during)
    driver.run(max_steps=STEPS + 5_000)

    driver.check_outputs()
    driver.check_idle()
    stats = driver.scheduler.stats()
    assert len(driver.finished) > STEPS / 40, "the load was too light to mean anything"
    if budgets:
        assert min(stats.dropped_tokens[policy] for policy in ("h2o", "window")) > 0
    if any(group.reach is not None for group in driver.config.groups):
        assert stats.evicted_by["sliding_window"] > 0
    if stats.host is not None:
        assert min(stats.host.saved_blocks, stats.host.loaded_blocks) > 0
    print(f"{load}: {driver.steps} steps, {len(driver.records)} requests, {stats}")


def test_the_loads_are_a_hundred_thousand_steps() -> None:
    assert STEPS * len(LOADS) >= 100_000
