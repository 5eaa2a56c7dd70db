"""The scheduler: a state machine that plans one step at a time and is told what came of it.

    add() abort()          between steps, or during one
    plan() -> StepPlan     admits, picks tokens, takes blocks; preempts when blocks run out
    commit(StepResult)     appends tokens, publishes and frees blocks, finishes requests
    fail(sequences)        instead of commit(), when the step could not be computed because of some sequences

It has no clock, no threads and no tensors, so the same calls always lead to the same state.

Why everything finishes. A request is refused on arrival unless it fits the pool alone. Admission takes all the blocks
that the prompt holds at a time, so two half-computed prompts do not starve each other. When blocks run out, the last
request by its `order` is preempted and goes back to its place at the front of the queue, so the first running request
can always take what it needs from the others and each step computes at least one token of it. The order is that of
priority and arrival; where tenants share fairly, that in which requests started.

Why nobody stalls. Each step computes at most `max_num_batched_tokens` tokens. Decoding requests take theirs first, one
each, so a long prompt delays them by no more than one such step; the rest, at least `block_size` tokens, goes to
prompts in order, so decoding never starves a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from server.kvpool.layout import EVERYTHING, Visibility
from server.reports import CacheSnapshot, HostReport
from server.scheduler.cache import Cache
from server.scheduler.fairness import TokenCounters
from server.scheduler.plan import build_plan
from server.scheduler.request import Request, Status
from server.scheduler.snapshot import cache_snapshot
from server.step import StepPlan, StepResult, TokenLogprobs

WaitingReason = Literal["slots", "kv_blocks", "token_budget", "shared_prompt"]
WAITING_REASONS: tuple[WaitingReason, ...] = ("slots", "kv_blocks", "token_budget", "shared_prompt")

MAX_OVERTAKES = 8
"""How many requests may start before one that came earlier and waits for blocks."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of the batch.

    num_blocks: blocks of the pool, the trash block not counted; num_host_blocks: those of host memory beside it.
    groups: what the layers of each table group see.
    max_num_batched_tokens: tokens one step may compute; at least `max_num_seqs + block_size`.
    max_scored_tokens: prompt positions one step may score, which bounds the memory of their logits.
    admission: "optimistic" admits while the prompt fits beside one block for each running request; "reserve" only while
        every admitted request can also reach its `max_tokens`, so that nothing is ever preempted.
    policy: who starts next: "fcfs" by (priority, arrival), "fair" by what their tenants have had (see `fairness`).
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_scored_tokens: int = 256
    prefix_caching: bool = True
    num_host_blocks: int = 0
    groups: tuple[Visibility, ...] = (EVERYTHING,)
    admission: Literal["optimistic", "reserve"] = "optimistic"
    policy: Literal["fcfs", "fair"] = "fcfs"

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs + self.block_size:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs + block_size")
        if self.max_scored_tokens < 1:
            raise ValueError("max_scored_tokens must be at least 1, or a scored prompt would never advance")


class NeverFits(Exception):
    """The request needs more blocks than the whole pool has."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step did for one request.

    token_id: the token it drew, None while its prompt is being computed.
    scores: log-probabilities of prompt positions scored in this step, in order.
    finish_reason: set with the last token.
    """

    request: Request
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of the moment, and totals since the start.

    unused_slots: slots for tokens in used blocks that hold none yet.
    recomputed_tokens: tokens that a preempted request had computed and had to compute again.
    evicted_by: blocks given up, by cause; kept_tokens, dropped_tokens: at compactions, by policy.
    """

    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    unused_slots: int
    preemptions: int
    queried_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    evicted_by: dict[str, int]
    kept_tokens: dict[str, int]
    dropped_tokens: dict[str, int]
    host: HostReport | None


class Scheduler:
    """Continuous batching over a paged pool. See the module's text for its guarantees."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = Cache(
            config.num_blocks,
            config.block_size,
            config.groups,
            config.max_num_batched_tokens,
            config.prefix_caching,
            config.num_host_blocks,
            config.admission == "reserve",
        )
        self.pool = self.cache.pool
        self.running: list[Request] = []  # by order
        self.waiting: list[Request] = []  # by order
        self.admitted: list[Request] = []  # by the last plan, for the first time
        self.counters = TokenCounters() if config.policy == "fair" else None
        self._in_flight: list[tuple[Request, int]] = []
        self._arrivals = 0
        self._starts = 0
        self._steps = 0
        self._blocked_by: WaitingReason = "token_budget"
        self._preemptions = 0
        self._recomputed_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of one sequence, without a budget, that the whole pool can hold."""
        return self.cache.longest()

    def add(self, request: Request) -> None:
        """Queue a new request. Raises NeverFits when it could not run even alone."""
        if (most := self.cache.most_blocks(request)) > self.config.num_blocks:
            raise NeverFits(
                f"the request may need {request.max_cached_tokens} tokens of KV cache, in {most} blocks; "
                f"the pool has {self.config.num_blocks} blocks, for {self.capacity_tokens} tokens"
            )
        request.arrival = self._arrivals
        # Between tenants nobody's priority may count, or each would claim the highest.
        request.order = (request.priority if self.counters is None else 0, request.arrival)
        self._arrivals += 1
        if request.leader is not None and request.leader.status is not Status.FINISHED:
            request.leader.followers.append(request)
        self._enqueue(request)

    def abort(self, request: Request) -> None:
        """End a request in any state; its blocks are free at once, or after the step that is computing it."""
        if not request.prompt_is_computed:
            self._hand_over(request)
        if request.status is Status.RUNNING:
            self.running.remove(request)
            if not self.tokens_in_flight(request):
                self.cache.release(request)
        elif request.status is Status.WAITING:
            self._dequeue(request)
        request.status = Status.FINISHED
        request.followers.clear()  # who points back at it

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and put it back to its place in the queue; its tokens are computed again.

        Not while a step is computing it.
        """
        self.running.remove(request)
        request.num_lost = request.num_computed
        self.cache.release(request)
        request.status = Status.WAITING
        request.num_preemptions += 1
        self._preemptions += 1
        self._enqueue(request)

    def tokens_in_flight(self, request: Request) -> int:
        """How many of its tokens the step in progress is computing."""
        return sum(count for flying, count in self._in_flight if flying is request)

    def plan(self) -> StepPlan | None:
        """Choose what the next step computes; None when nothing is to do. Each plan must be committed or failed."""
        if self._in_flight:
            raise RuntimeError("the last plan has not been committed")
        self.admitted = []
        budget = self.config.max_num_batched_tokens
        score_budget = self.config.max_scored_tokens
        scheduled: list[tuple[Request, int]] = []
        preempted = False

        for request in [r for r in self.running if not r.is_prefilling]:
            if request.status is not Status.RUNNING:
                continue  # preempted for an earlier one in this loop
            preempted |= self._make_room(request, 1, scheduled)
            if request.status is Status.RUNNING:
                scheduled.append((request, 1))
                budget -= 1

        for request in [r for r in self.running if r.is_prefilling]:
            if request.status is not Status.RUNNING or not budget:
                continue
            count = self._chunk(request, budget, score_budget)
            if not count:
                continue
            preempted |= self._make_room(request, count, scheduled)
            if request.status is Status.RUNNING:
                scheduled.append((request, count))
                budget -= count
                score_budget -= 0 if request.is_scored else count

        if preempted:
            self._blocked_by = "kv_blocks"
        else:
            self._admit(scheduled, budget, score_budget)
        if not scheduled:
            return None
        # The cache may hold all but the last token of a request that was preempted: it then decodes at once.
        scheduled.sort(key=lambda chosen: chosen[0].is_prefilling)
        self._in_flight = scheduled
        self._steps += 1
        return build_plan(self._steps, scheduled, self.config.block_size, self.cache.take_chores())

    def commit(self, result: StepResult, plan: StepPlan) -> list[Progress]:
        """Record what the last plan produced. Requests aborted meanwhile give their blocks back and report nothing."""
        in_flight, self._in_flight = self._in_flight, []
        self.cache.settle()
        mostly_prompt = plan.num_tokens >= 4 * plan.num_sequences
        self.cache.learn(result, plan.num_tokens, len(plan.saves) + len(plan.loads), mostly_prompt=mostly_prompt)
        sampled = {int(row): index for index, row in enumerate(plan.sample_rows)}
        scores: dict[int, list[TokenLogprobs]] = {}
        for row, score in zip(plan.score_rows, result.scores, strict=True):
            scores.setdefault(int(row), []).append(score)

        progress: list[Progress] = []
        for row, (request, count) in enumerate(in_flight):
            if request.status is Status.FINISHED:
                self.cache.release(request)
                continue
            request.num_computed += count
            self.cache.publish(request)
            scored = tuple(scores.get(row, ()))
            request.num_scored += len(scored)
            index = sampled.get(row)
            if index is not None:
                token_id = int(result.token_ids[index])
                request.append_token(token_id)
                if self.counters is not None:
                    self.counters.charge(request.tenant, output_tokens=1)
                finish_reason = self._finish_reason(request, token_id)
                progress.append(Progress(request, token_id, result.logprobs[index], scored, finish_reason))
            else:
                prompt_only = request.max_tokens == 0 and request.prompt_is_computed
                finish_reason = "length" if prompt_only else None
                progress.append(Progress(request, scores=scored, finish_reason=finish_reason))
            if finish_reason is not None:
                self.abort(request)
        return progress

    def fail(self, sequences: Iterable[int]) -> list[Request]:
        """Take the last plan back, since these of its sequences cannot be computed, and end them; returns them.

        The others keep what they have and are planned again.
        """
        in_flight, self._in_flight = self._in_flight, []
        self.cache.settle()
        failed = [in_flight[index][0] for index in sequences if in_flight[index][0].status is Status.RUNNING]
        for request, count in in_flight:
            request.num_observed = max(request.num_observed, request.num_computed + count)
            if request.status is Status.FINISHED:
                self.cache.release(request)
        for request in failed:
            self.abort(request)
        return failed

    def stats(self) -> SchedulerStats:
        shared = sum(self._awaits_leader(request) for request in self.waiting if request.leader is not None)
        by_reason: dict[str, int] = dict.fromkeys(WAITING_REASONS, 0)
        by_reason["shared_prompt"] = shared
        by_reason[self._blocked_by] += len(self.waiting) - shared
        # A block that several requests share is full, so that what each leaves unused is in blocks of its own.
        unused = sum(map(self.cache.count_unused, self._holders()))
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.waiting),
            waiting_by_reason=by_reason,
            blocks_used=self.pool.num_used,
            blocks_cached=self.pool.num_cached,
            blocks_free=self.pool.num_free,
            unused_slots=unused,
            preemptions=self._preemptions,
            queried_tokens=self.cache.queried_tokens,
            hit_tokens=self.cache.hit_tokens,
            recomputed_tokens=self._recomputed_tokens,
            evicted_by={**self.cache.evicted_by, "prefix_lru": self.pool.num_evictions},
            kept_tokens=dict(self.cache.kept_tokens),
            dropped_tokens=dict(self.cache.dropped_tokens),
            host=self.cache.host_report(),
        )

    def snapshot(self) -> CacheSnapshot:
        """Who holds which blocks now; also while a step is in progress."""
        ended = [request for request in self._holders() if request.status is Status.FINISHED]
        return cache_snapshot(self.cache, self.running, ended, self.waiting)

    def check_integrity(self) -> None:
        """Check the pool, the prefix cache and the lists; raises AssertionError. May be called at any time."""
        self.cache.check_integrity(self._holders())
        if self.counters is not None:
            self.counters.check_integrity(self.waiting)
        assert len(self.running) <= self.config.max_num_seqs, "more requests run than may"
        for queue, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            assert all(request.status is status for request in queue), f"a request in the wrong list: {status}"
            assert queue == sorted(queue, key=_order), "a list is out of order"
        for request in self.running:
            assert request.num_computed <= request.num_tokens
        for request in self.waiting:
            assert request.num_blocks == 0, "a waiting request holds blocks"
            assert request.num_computed == 0, "a waiting request has computed tokens"

    def _holders(self) -> list[Request]:
        """Those that hold blocks: what runs, and what was aborted while the step in progress computes it."""
        aborted = [request for request, _ in self._in_flight if request.status is Status.FINISHED]
        return [*self.running, *aborted]

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)
        if self.counters is not None:
            self.counters.enter(request)

    def _dequeue(self, request: Request) -> None:
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        if self.counters is not None:
            self.counters.leave(request)

    def _hand_over(self, leader: Request) -> None:
        """The next of the siblings that wait for a prompt computes it, when `leader` will not."""
        waiting = sorted((request for request in leader.followers if request.status is Status.WAITING), key=_order)
        if waiting:
            heir, *others = waiting
            heir.leader = None
            heir.followers += others
            for request in others:
                request.leader = heir

    def _make_room(self, request: Request, count: int, scheduled: list[tuple[Request, int]]) -> bool:
        """Give a running request the blocks of its next `count` tokens; whether others, or it itself, had to go for it.

        Who goes is the last in order, though it may be in the plan already.
        """
        preempted = False
        while not self.cache.extend(request, count):
            victim = self.running[-1]
            self.preempt(victim)
            preempted = True
            scheduled[:] = [chosen for chosen in scheduled if chosen[0] is not victim]
            if victim is request:
                break
        return preempted

    def _chunk(self, request: Request, budget: int, score_budget: int) -> int:
        """How many tokens of a prompt to compute now."""
        count = min(request.num_tokens - request.num_computed, budget)
        most = self.cache.most_now(request)
        if most is not None:
            count = min(count, most)
        if not request.is_scored:
            count = min(count, score_budget)
        return count

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int, score_budget: int) -> None:
        """Move requests from the queue into the batch, in order; where one waits for blocks, a few may overtake it."""
        queue = iter(self.waiting.copy()) if self.counters is None else self.counters.in_turn()
        blocked: Request | None = None
        num_passed_over = 0
        while True:
            if len(self.running) >= self.config.max_num_seqs:
                self._blocked_by = "slots" if blocked is None else "kv_blocks"
                return
            if not budget:
                self._blocked_by = "token_budget" if blocked is None else "kv_blocks"
                return
            if blocked is not None and (num_passed_over > MAX_OVERTAKES or not self._may_be_overtaken(blocked)):
                return
            request = next(queue, None)
            if request is None or (blocked is not None and request.priority > blocked.priority):
                return
            if self._awaits_leader(request):
                continue
            if not self._take_blocks(request):
                self._blocked_by = "kv_blocks"
                blocked = blocked or request
                num_passed_over += 1
                continue
            if blocked is not None:
                blocked.num_overtaken += 1
            count = self._chunk(request, budget, score_budget)
            if count:
                scheduled.append((request, count))
                budget -= count
                score_budget -= 0 if request.is_scored else count

    def _may_be_overtaken(self, request: Request) -> bool:
        """Whether smaller requests may take blocks that are too few for this one.

        Only equally urgent ones, and only so often, or it would never start; not one that was preempted, whose blocks
        would be gone again; and not where turns are a matter of fairness.
        """
        return self.counters is None and not request.num_preemptions and request.num_overtaken < MAX_OVERTAKES

    def _awaits_leader(self, request: Request) -> bool:
        """Whether a sibling is about to compute, into the prefix cache, the prompt this request shares with it."""
        # Asked of the whole queue at every step, so the fields are read as they are.
        leader = request.leader
        return (
            leader is not None
            and leader.status is not Status.FINISHED
            and leader.num_computed < leader.num_prompt
            and request.num_tokens == request.num_prompt
            and request.uses_cache
            and self.cache.prefix is not None
        )

    def _take_blocks(self, request: Request) -> bool:
        """Admit the request if its blocks are there: those of all its tokens, less what the prefix cache holds."""
        if self.cache.reserve:
            headroom = sum(map(self.cache.outstanding_blocks, self.running))
        else:
            headroom = len(self.running) * len(self.config.groups)
        if not self.cache.admit(request, headroom):
            return False

        self._dequeue(request)
        if self.counters is not None and request.num_preemptions == 0:
            request.order = (-1, self._starts)  # whose turn came later gives way first, and not who arrived later
            self._starts += 1
        request.status = Status.RUNNING
        insort(self.running, request, key=_order)
        if request.num_preemptions == 0:
            self.admitted.append(request)
            if self.counters is not None:
                self.counters.charge(request.tenant, input_tokens=request.num_prompt - request.num_cached)
        else:
            self._recomputed_tokens += max(0, request.num_lost - request.num_computed)
        return True

    def _finish_reason(self, request: Request, token_id: int) -> Literal["stop", "length"] | None:
        if token_id in request.params.stop_token_ids:
            return "stop"
        return "length" if request.num_outputs == request.max_tokens else None


def _order(request: Request) -> tuple[int, int]:
    return request.order
