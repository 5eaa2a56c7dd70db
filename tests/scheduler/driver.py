"""Drives a scheduler with the fake runner and checks, at every step, what must hold at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from server.kvpool.layout import held_blocks
from server.kvpool.prefix import NOT_ON_HOST, PrefixNode
from server.reports import HostReport
from server.scheduler.budget import make_budget
from server.scheduler.request import Request, Status
from server.scheduler.scheduler import Progress, Scheduler, SchedulerConfig, SchedulerStats
from server.step import EvictionPolicy, SamplingParams, StepPlan, TokenLogprobs
from tests.scheduler.alone import Alone, Keeping, histories_alone, outputs_alone, scores_alone
from tests.scheduler.fake_runner import FakeRunner, Shadow

GREEDY = SamplingParams(temperature=0.0)


def config(**changes: object) -> SchedulerConfig:
    """A small batch: blocks of 4, 64 of them, 8 sequences, 32 tokens a step."""
    values: dict[str, object] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        **changes,
    }
    return SchedulerConfig(**values)


@dataclass
class Record:
    """What was seen of one request, and how it is cached."""

    keeping: Keeping = field(default_factory=Keeping)
    outputs: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    first_step: int | None = None  # of its first output
    last_step: int | None = None


class Driver:
    """A scheduler, a fake runner and a record of each request."""

    def __init__(self, scheduler_config: SchedulerConfig, *, integrity_every: int = 1) -> None:
        self.config = scheduler_config
        self.scheduler = Scheduler(scheduler_config)
        self.runner = FakeRunner(scheduler_config)
        self.records: dict[Request, Record] = {}
        self.finished: list[Request] = []
        self._live: list[Request] = []  # those that may hold blocks, and some that do no more
        self._totals = (0,) * 8
        self.integrity_every = integrity_every
        self.steps = 0
        self.plan: StepPlan | None = None
        self.progress: list[Progress] = []
        self._names = 0

    def request(
        self, prompt: Sequence[int], max_tokens: int = 8, params: SamplingParams = GREEDY, **options: object
    ) -> Request:
        self._names += 1
        return Request(f"r{self._names}", prompt, params, max_tokens, **options)

    def budgeted(
        self,
        prompt: Sequence[int],
        keep: int | None,
        policy: EvictionPolicy = "window",
        max_tokens: int = 8,
        params: SamplingParams = GREEDY,
        **options: object,
    ) -> Request:
        """Add a request that keeps so many tokens, None for all."""
        budget = None
        if keep is not None:
            longest = len(prompt) + max(0, max_tokens - 1)
            budget = make_budget(keep, policy, self.config.block_size, longest)
        request = self.add(prompt, max_tokens, params, budget=budget, **options)
        self.records[request].keeping = Keeping(self.config.groups, keep, policy, self.config.block_size)
        return request

    def add(
        self, prompt: Sequence[int], max_tokens: int = 8, params: SamplingParams = GREEDY, **options: object
    ) -> Request:
        request = self.request(prompt, max_tokens, params, **options)
        self.scheduler.add(request)
        self.records[request] = Record(Keeping(self.config.groups))
        self._live.append(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        self.records[request].finish_reason = "abort"

    def step(self, during: Callable[[], None] | None = None) -> list[Progress]:
        """One plan, run and commit; `during` is called while the plan is in flight."""
        scheduler = self.scheduler
        decoding = [request for request in scheduler.running if not request.is_prefilling]
        before = {request: request.num_computed for request in scheduler.running}
        preemptions = self._totals[0]

        self.plan = plan = scheduler.plan()
        assert (plan is not None) == scheduler.has_work, "there is work and nothing is planned"
        if plan is None:
            self._check_counts()
            self.progress = []
            return []
        self.steps += 1
        assert plan.step == self.steps
        self._check_budget(plan, decoding)
        if any(request.status is Status.WAITING for request in before):
            assert before.keys() >= set(scheduler.running), "a request was admitted in the step of a preemption"
        self._check_plan(plan)
        if self.steps % 4 == 0:
            self._check_counts()
        if during is not None:
            during()
            self._check_counts()
        self.progress = scheduler.commit(self.runner.run(plan), plan)
        self._record(plan)
        stats = self._check_counts()
        if self.steps % self.integrity_every == 0:
            scheduler.check_integrity()
            self.check_contents()
        if self.config.admission == "reserve":
            assert stats.preemptions == 0, "a reserved request was preempted"
        if during is None and before:
            first = min(before, key=lambda request: request.order)
            moved = first.num_computed > before[first] or first.status is Status.FINISHED
            assert moved, "the first running request made no progress"
            unmoved = [
                request
                for request in decoding
                if request.status is not Status.FINISHED and request.num_computed <= before[request]
            ]
            assert len(unmoved) <= stats.preemptions - preemptions, "a decoding request was left out of a step"
        return self.progress

    def fail(self, *sequences: int, during: Callable[[], None] | None = None) -> list[Request]:
        """One plan that fails, once it was computed, because of `sequences`, which are taken modulo those in it."""
        self.plan = plan = self.scheduler.plan()
        assert plan is not None
        self.steps += 1
        self._check_plan(plan)
        if during is not None:
            during()
        self.runner.run(plan)
        failed = self.scheduler.fail({sequence % plan.num_sequences for sequence in sequences})
        for request in failed:
            assert self.records[request].finish_reason is None, "an ended request failed"
            self.records[request].finish_reason = "error"
        self._check_counts()
        self.scheduler.check_integrity()
        self.check_contents()
        return failed

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        while self.scheduler.has_work:
            self.step()
            assert self.steps <= max_steps, "the work does not come to an end"
        assert self.scheduler.plan() is None

    def check_idle(self) -> None:
        """Nothing runs, waits or is held."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert sum(stats.waiting_by_reason.values()) == 0
        assert stats.blocks_free + stats.blocks_cached == self.config.num_blocks
        assert not self.scheduler.has_work
        self.scheduler.check_integrity()

    def check_outputs(self) -> None:
        """Every request that came to its end got what it gets alone; every other one a beginning of that."""
        for request, record in self.records.items():
            prompt = request.token_ids[: request.num_prompt].tolist()
            outputs, finish_reason = outputs_alone(prompt, request.params, request.max_tokens, record.keeping)
            scores = [] if request.prompt_logprobs is None else scores_alone(prompt, record.keeping)
            if record.finish_reason in (None, "abort", "error"):
                outputs, scores = outputs[: len(record.outputs)], scores[: len(record.scores)]
                finish_reason = str(record.finish_reason)
            assert record.outputs == outputs, request.request_id
            assert record.scores == scores, request.request_id
            assert str(record.finish_reason) == finish_reason, request.request_id

    def check_contents(self) -> None:
        """Every published block, of the pool and of host memory, holds the text it is found by, and every budget the
        tokens that it should, with the attention they have had. Not during a step."""
        for request in self.scheduler.running:
            if request.budget is not None:
                self._check_kept(request)
        prefix, size = self.scheduler.cache.prefix, self.config.block_size
        if prefix is None:
            return
        texts: dict[PrefixNode, list[int]] = {}

        def text(node: PrefixNode) -> list[int]:
            if node not in texts:
                before = [] if node.parent is None else text(node.parent)
                texts[node] = before + np.frombuffer(node.tokens, dtype=np.int64).tolist()
            return texts[node]

        def check(shadow: Shadow, block: int, group: int, node: PrefixNode) -> None:
            tokens = text(node)
            start = len(tokens) - size
            assert (shadow.groups[block] == group).all(), "a published block holds another group's layers"
            assert shadow.positions[block].tolist() == list(range(start, start + size))
            histories = histories_alone(tokens, Keeping(self.config.groups))
            assert shadow.histories[block].tolist() == histories[start:], "a published block holds another text"

        for node in prefix._nodes.values():
            for group, block in enumerate(node.blocks):
                if block:
                    check(self.runner.pool, block, group, node)
            for group, block in enumerate(node.host):
                if block != NOT_ON_HOST:
                    check(self.runner.host, block, group, node)

    def _check_kept(self, request: Request) -> None:
        alone = Alone(self.records[request].keeping)
        for token in request.token_ids[: request.num_computed].tolist():
            alone.append(token)
        if len(alone.cache) > request.num_computed - request.num_evicted:
            alone.give_up()  # for a step that failed
        size, (table,) = self.config.block_size, request.tables
        blocks = table.ids[: table.end].astype(np.int64)
        slots = (blocks[:, None] * size + np.arange(size)).ravel()[: len(alone.cache)]
        pool = self.runner.pool
        assert pool.positions.ravel()[slots].tolist() == [token.position for token in alone.cache]
        assert pool.histories.ravel()[slots].tolist() == [token.history for token in alone.cache]
        if (
            request.budget is not None
            and request.budget.policy == "h2o"
            and request.num_observed <= request.num_computed
        ):
            seen = self.runner.attention[slots].tolist()
            assert seen == [token.attention for token in alone.cache], "attention is forgotten, or counted twice"

    def _check_plan(self, plan: StepPlan) -> None:
        pool = self.scheduler.pool
        for block in np.unique(plan.slots // self.config.block_size).tolist():
            assert not pool.is_published(block), "a published block is written again"
        for compaction in plan.compactions:
            kept = compaction.block_table[: -(-compaction.keep // self.config.block_size)].tolist()
            assert not any(pool.is_published(block) or pool.is_shared(block) for block in kept)
            ((request, count),) = [
                (request, count) for request, count in self.scheduler._in_flight if request.blocks[:1] == kept[:1]
            ]
            length = request.num_computed - request.num_evicted + count
            assert request.num_blocks == -(-length // self.config.block_size), "blocks of what it gave up are kept"
        if plan.observed is not None:
            policies = [r.budget.policy if r.budget else None for r, _ in self.scheduler._in_flight]
            watched = {policy for policy, observed in zip(policies, plan.observed, strict=True) if observed}
            assert watched <= {"h2o"}, "attention is watched that nobody asks for"

    def _check_budget(self, plan: StepPlan, decoding: list[Request]) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert plan.num_sequences <= self.config.max_num_seqs
        assert len(plan.score_targets) <= self.config.max_scored_tokens
        decodes_planned = sum(request.status is Status.RUNNING for request in decoding)
        assert (np.diff(plan.query_starts)[:decodes_planned] == 1).all(), "decodes do not come first"
        assert plan.num_decodes >= decodes_planned

    def _check_counts(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        assert stats.running <= self.config.max_num_seqs
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_used == self.config.num_blocks
        assert min(stats.blocks_free, stats.blocks_cached, stats.blocks_used) >= 0
        assert sum(stats.waiting_by_reason.values()) == stats.waiting
        assert min(stats.waiting_by_reason.values()) >= 0
        size, step_tokens = self.config.block_size, self.config.max_num_batched_tokens
        filled: dict[int, int] = {}  # tokens in each block, whoever wrote them
        self._live = [r for r in self._live if r.status is not Status.FINISHED or r.tables]
        for request in self._live:
            held = request.num_computed - request.num_evicted
            most = request.max_cached_tokens
            if request.budget is not None:
                most = min(most, request.budget.keep + request.budget.slack)
                assert held <= most, "a sequence exceeds its budget"
            for group, table in zip(self.config.groups, request.tables, strict=bool(request.tables)):
                blocks = table.blocks
                for block, start in zip(blocks, range(table.first * size, table.end * size, size), strict=True):
                    tokens = min(size, max(0, held - start))
                    filled[block] = max(tokens, filled.get(block, 0))
                bound = held_blocks(group, most, size, step_tokens)
                assert len(blocks) <= bound, "a sequence holds more blocks than it may ever need"
        assert stats.blocks_used == len(filled), "blocks are used that no request holds, or the reverse"
        assert stats.unused_slots == sum(size - tokens for tokens in filled.values()), "slots are unused, or used twice"
        totals = (
            stats.preemptions,
            sum(stats.evicted_by.values()),
            stats.queried_tokens,
            stats.hit_tokens,
            stats.recomputed_tokens,
            sum(stats.kept_tokens.values()),
            sum(stats.dropped_tokens.values()),
            0 if stats.host is None else stats.host.evicted_blocks,
        )
        self._check_host(stats.host)
        assert all(now >= before for now, before in zip(totals, self._totals, strict=True)), "a total went down"
        self._totals = totals
        return stats

    def _check_host(self, host: HostReport | None) -> None:
        prefix = self.scheduler.cache.prefix
        assert (host is None) == (prefix is None or not self.config.num_host_blocks)
        if prefix is None or host is None:
            return
        in_flight = self.plan if self.scheduler._in_flight else None
        saved = self.runner.num_saved + (len(in_flight.saves) if in_flight else 0)
        loaded = self.runner.num_loaded + (len(in_flight.loads) if in_flight else 0)
        assert (host.saved_blocks, host.loaded_blocks) == (saved, loaded), "copies are miscounted"
        assert host.capacity_blocks == self.config.num_host_blocks
        held = sum(block != NOT_ON_HOST for node in prefix._nodes.values() for block in node.host)
        assert host.used_blocks == held == saved - host.evicted_blocks

    def _record(self, plan: StepPlan) -> None:
        for progress in self.progress:
            record = self.records[progress.request]
            assert record.finish_reason is None, "a finished request reports progress"
            record.scores += progress.scores
            if progress.token_id is not None:
                record.outputs.append(progress.token_id)
                if record.first_step is None:
                    record.first_step = self.steps
            if progress.finish_reason is not None:
                record.finish_reason = progress.finish_reason
                record.last_step = self.steps
                self.finished.append(progress.request)
