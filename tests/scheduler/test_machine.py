"""Hypothesis drives the scheduler with whatever it likes, and shrinks what goes wrong."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from server.kvpool.layout import EVERYTHING, Visibility
from server.scheduler.request import Request, Status
from server.scheduler.scheduler import NeverFits
from server.step import EvictionPolicy, SamplingParams
from tests.scheduler.driver import Driver, config

MAX_SEQS = 4
WINDOW, CHUNK = Visibility(window=3), Visibility(chunk=4)
GROUPS = [(EVERYTHING,), (EVERYTHING,), (WINDOW,), (CHUNK,), (EVERYTHING, WINDOW), (CHUNK, EVERYTHING, WINDOW)]


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts are of two letters, so that they share prefixes often; the pool fits two or three of the longest."""

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(1, 12),
        groups=st.sampled_from(GROUPS),
        num_host_blocks=st.sampled_from([0, 0, 1, 3, 20]),
        spare_budget=st.integers(0, 12),
        max_scored_tokens=st.integers(1, 6),
        prefix_caching=st.booleans(),
        admission=st.sampled_from(["optimistic", "reserve"]),
        policy=st.sampled_from(["fcfs", "fair"]),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        groups: tuple[Visibility, ...],
        num_host_blocks: int,
        spare_budget: int,
        max_scored_tokens: int,
        prefix_caching: bool,
        admission: str,
        policy: str,
    ) -> None:
        self.driver = Driver(
            config(
                block_size=block_size,
                num_blocks=num_blocks * len(groups),
                groups=groups,
                num_host_blocks=num_host_blocks,
                max_num_seqs=MAX_SEQS,
                max_num_batched_tokens=MAX_SEQS + block_size + spare_budget,
                max_scored_tokens=max_scored_tokens,
                prefix_caching=prefix_caching,
                admission=admission,
                policy=policy,
            )
        )

    @property
    def open(self) -> list[Request]:
        return [request for request in self.driver.records if request.status is not Status.FINISHED]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(0, 8),
        siblings=st.integers(0, 2),
        stop=st.integers(0, 12),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "a"]),
        tenant=st.sampled_from(["a", "b"]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        keep=st.sampled_from([None, None, 1, 3, 6]),
        eviction=st.sampled_from(["h2o", "window"]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        siblings: int,
        stop: int,
        priority: int,
        salt: str,
        tenant: str,
        prompt_logprobs: int | None,
        keep: int | None,
        eviction: EvictionPolicy,
    ) -> None:
        leader = None
        if self.driver.config.groups != (EVERYTHING,):
            keep = None
        for seed in range(siblings + 1):
            params = SamplingParams(seed=seed, stop_token_ids=frozenset(range(stop)))
            options = {
                "priority": priority,
                "salt": salt,
                "tenant": tenant,
                "prompt_logprobs": prompt_logprobs,
                "leader": leader,
            }
            length = len(prompt) + max(0, max_tokens - 1)
            slack = 4 * self.driver.config.block_size
            most = length if keep is None else min(length, keep + slack)
            if most > self.driver.scheduler.capacity_tokens:
                try:
                    self.driver.budgeted(prompt, keep, eviction, max_tokens, params, **options)
                except NeverFits:
                    return
                raise AssertionError("a request that never fits was queued")
            request = self.driver.budgeted(prompt, keep, eviction, max_tokens, params, **options)
            leader = leader or request

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(self.open)))
        self.driver.scheduler.check_integrity()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open))

        def abort() -> None:
            self.driver.abort(request)
            self.driver.scheduler.check_integrity()

        self.driver.step(during=abort)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), sequence=st.integers(0, MAX_SEQS - 1), aborts=st.booleans())
    def fail(self, data: st.DataObject, sequence: int, aborts: bool) -> None:
        request = data.draw(st.sampled_from(self.open))
        self.driver.fail(sequence, during=(lambda: self.driver.abort(request)) if aborts else None)

    @precondition(lambda self: self.driver.scheduler.running and self.driver.config.admission == "optimistic")
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.driver.scheduler.preempt(data.draw(st.sampled_from(self.driver.scheduler.running)))
        self.driver.scheduler.check_integrity()

    @rule()
    def drain(self) -> None:
        """Everything finishes: no request needs more steps than it has tokens, plus as many for each preemption."""
        left = sum(request.num_prompt + request.max_tokens + 1 for request in self.open)
        self.driver.run(max_steps=self.driver.steps + left * (1 + len(self.open)))
        self.driver.check_outputs()
        self.driver.check_idle()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=180, stateful_step_count=30, deadline=None, report_multiple_bugs=False)
