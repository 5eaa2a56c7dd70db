"""At least 100,000 steps of random load: nothing corrupts, nothing leaks, everything finishes with the right tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from server.scheduler.request import Request, Status
from server.step import SamplingParams
from tests.scheduler.driver import Driver, config
from tests.scheduler.fake_runner import VOCAB_SIZE

STEPS = 5_600  # of each load
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
}


class Traffic:
    """Draws arrivals and aborts; prompts share prefixes of a few documents."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.driver = driver
        self.rng = random.Random(seed)
        self.longest = min(driver.scheduler.capacity_tokens, 40)
        self.documents = [[self.rng.randrange(VOCAB_SIZE) for _ in range(self.longest)] for _ in range(4)]
        self.open: list[Request] = []
        self.rate = driver.config.max_num_seqs / 32

    def prompt(self) -> list[int]:
        length = self.rng.randint(1, self.longest)
        shared = self.rng.choice(self.documents)[: self.rng.randint(0, length)]
        return shared + [self.rng.randrange(VOCAB_SIZE) for _ in range(length - len(shared))]

    def arrive(self) -> None:
        rng = self.rng
        prompt = self.prompt()
        room = self.longest + 1 - len(prompt)
        leader = None
        for _ in range(rng.choice((1, 1, 1, 3))):
            request = self.driver.add(
                prompt,
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
    driver = Driver(config(**LOADS[load]), integrity_every=50)
    traffic = Traffic(driver, seed=list(LOADS).index(load))
    while driver.steps < STEPS:
        driver.step(traffic.turn())
    driver.run(max_steps=STEPS + 5_000)

    driver.check_outputs()
    driver.check_idle()
    stats = driver.scheduler.stats()
    assert len(driver.finished) > STEPS / 40, "the load was too light to mean anything"
    print(f"{load}: {driver.steps} steps, {len(driver.records)} requests, {stats}")


def test_the_loads_are_a_hundred_thousand_steps() -> None:
    assert STEPS * len(LOADS) >= 100_000
