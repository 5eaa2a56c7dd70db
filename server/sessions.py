"""The open requests on the engine's side, from when they are taken in to their last output, and the books on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from server.admission import Admission
from server.deadlines import Deadlines
from server.delivery import GenerationStream
from server.generation import (
    DeadlineExceeded,
    EngineError,
    GenerationFailed,
    GenerationRequest,
    GrammarFailed,
    ModelCard,
    Output,
    QueueTimeout,
)
from server.metrics import Metrics
from server.reports import AbortCause, PoolReport
from server.scheduler.budget import make_budget
from server.scheduler.request import Request
from server.scheduler.scheduler import Progress, Scheduler
from server.session import Session, Submission
from server.step import ConstraintFailed
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Sessions:
    """Stands between the scheduler, which knows sequences, and the callers' streams.

    It never waits and has no threads: the engine's thread calls it, between steps and during one. What callers are to
    get is left in `outbox`, with the streams it is for; whoever delivers it empties that.

    queue_timeout, request_timeout: the operator's limits in seconds, None for none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        admission: Admission,
        metrics: Metrics,
        card: ModelCard,
        tokenizer: Tokenizer,
        *,
        queue_timeout: float | None,
        request_timeout: float | None,
    ) -> None:
        self.outbox: list[tuple[GenerationStream, Output | Exception]] = []
        self._scheduler = scheduler
        self._admission = admission
        self._metrics = metrics
        self._card = card
        self._tokenizer = tokenizer
        self._queue_timeout = queue_timeout
        self._request_timeout = request_timeout
        self._open: dict[str, Session] = {}
        self._streams: dict[str, GenerationStream] = {}
        self._deadlines = Deadlines()
        self._recomputed_tokens = 0

    @property
    def next_deadline(self) -> float | None:
        """When the first of them runs out of time, on the monotonic clock."""
        return self._deadlines.next

    def take_in(
        self, requests: Sequence[GenerationRequest], streams: Sequence[GenerationStream], submission: Submission
    ) -> None:
        """Queue requests that were submitted together."""
        for request, stream in zip(requests, streams, strict=True):
            session = self._make(request, submission)
            self._open[request.request_id] = session
            self._streams[request.request_id] = stream
            self._deadlines.set(request.request_id, _least(session.queue_deadline, session.deadline))

    def _make(self, request: GenerationRequest, submission: Submission) -> Session:
        leader = self._open.get(request.leader) if request.leader is not None else None
        budget = None
        if request.kv_budget is not None:
            longest = len(request.prompt_ids) + max(0, request.max_tokens - 1)
            budget = make_budget(request.kv_budget, request.kv_policy, self._scheduler.config.block_size, longest)
        sequence = Request(
            request.request_id,
            request.prompt_ids,
            request.params,
            request.max_tokens,
            priority=request.priority,
            salt=request.cache_salt,
            read_cache=request.read_cache,
            budget=budget,
            prompt_logprobs=request.prompt_logprobs,
            leader=leader.sequence if leader is not None else None,
            constraint=request.constraint,
            tenant=request.tenant,
        )
        self._scheduler.add(sequence)
        queue_timeout = _least(request.queue_timeout, self._queue_timeout)
        timeout = _least(request.timeout, self._request_timeout)
        return Session(request, sequence, submission, queue_timeout, timeout)

    def note_starts(self, now: float) -> None:
        """Those that the last plan admitted for the first time have started."""
        for sequence in self._scheduler.admitted:
            session = self._open[sequence.request_id]
            session.admitted = now
            session.submission.started = True
            self._streams[sequence.request_id].queue_seconds = now - session.arrived
            self._admission.leave(session.request)

    def advance(self, progress: Iterable[Progress], now: float) -> None:
        """Make the outputs of what a step, committed `now`, did."""
        released = sum(self._advance(item, now) for item in progress)
        if released:
            self._metrics.tokens.generated(released)

    def _advance(self, progress: Progress, now: float) -> int:
        """The same for one request; returns how many tokens became certain."""
        session = self._open[progress.request.request_id]
        if not session.prompt_counted and (progress.token_id is not None or progress.finish_reason is not None):
            session.prompt_counted = True
            if session.sequence.leader is None:  # siblings share one prompt, which usage counts once
                self._metrics.tokens.prompt_computed(progress.request.num_prompt, progress.request.num_cached)
        if progress.token_id is not None:
            session.submission.answered = True
            if session.first_token is None:
                session.first_token = now
                self._metrics.requests.first_token(now - session.arrived)
            else:
                assert session.last_token is not None
                self._metrics.requests.inter_token(now - session.last_token)
            session.last_token = now
        try:
            output = session.advance(progress, self._tokenizer, self._card.eos_token_ids)
        except Exception as error:  # whatever a grammar or a tokenizer does, the neighbours go on
            if isinstance(error, ConstraintFailed):
                failure: GenerationFailed = GrammarFailed(str(error))
                logger.warning("request %s: %s", session.request.request_id, error)
            else:
                failure = GenerationFailed("the output of this request could not be processed (see the server's log)")
                logger.exception("request %s failed", session.request.request_id)
            if progress.finish_reason is None:
                self._scheduler.abort(progress.request)
            self._fail(session, failure)
            return 0
        if output is None:
            return 0
        session.submission.answered = True
        self._send(session, output)
        if output.finish_reason is not None:
            if progress.finish_reason is None:
                self._scheduler.abort(progress.request)  # a stop string, which the scheduler does not know of
            self._close(session, output.finish_reason, None, now)
        return len(output.tokens)

    def fail(self, sequences: Iterable[Request], kind: type[GenerationFailed], reason: str) -> None:
        """End requests that the scheduler has let go of, each with an error of its own."""
        for sequence in sequences:
            self._fail(self._open[sequence.request_id], kind(reason))

    def _fail(self, session: Session, failure: GenerationFailed) -> None:
        self._send(session, failure)
        self._metrics.tokens.discarded("error", session.num_held)
        self._close(session, "error", None, time.monotonic())

    def cut_off(self, request_id: str, cause: AbortCause) -> None:
        """End a request; unknown ids, and those just finished, are ignored."""
        session = self._open.get(request_id)
        if session is not None:
            self._end_early(session, session.cut_off(), cause, time.monotonic())

    def end_expired(self) -> None:
        """End the requests whose time is up."""
        now = time.monotonic()
        for request_id in self._deadlines.passed(now):
            session = self._open[request_id]
            if _is_past(session.queue_deadline, now) and not session.submission.started:
                self._time_out(session, now)
            elif _is_past(session.deadline, now):
                self._run_out(session, now)
            else:  # it has started, or one submitted with it has
                self._deadlines.set(request_id, session.deadline)

    def _time_out(self, session: Session, now: float) -> None:
        """End a request that did not start in time."""
        assert session.queue_deadline is not None
        failure = QueueTimeout(
            f"The request did not start within {session.queue_deadline - session.arrived:g} seconds "
            "('queue_timeout', --queue-timeout); the server is busy, try again later.",
            self._admission.retry_after(len(self._scheduler.waiting)),
        )
        self._end_early(session, failure, "queue_timeout", now)

    def _run_out(self, session: Session, now: float) -> None:
        """End a request that has had its time, with what it has; without anything, with an error."""
        assert session.deadline is not None
        has_scores = session.request.prompt_logprobs is None or session.first_token is not None
        if session.submission.answered and has_scores:
            output = session.run_out()
            self._metrics.tokens.generated(len(output.tokens))
            self._end_early(session, output, "deadline", now)
            return
        failure = DeadlineExceeded(
            f"The request had no output after {session.deadline - session.arrived:g} seconds "
            "('request_timeout', --request-timeout)."
        )
        self._end_early(session, failure, "deadline_empty", now)

    def _end_early(self, session: Session, last: Output | EngineError, cause: AbortCause, now: float) -> None:
        """End a request before it is complete; `last` is what its caller gets."""
        sequence = session.sequence
        in_vain = session.num_held
        if session.first_token is None:
            in_vain = sequence.num_computed - sequence.num_cached + self._scheduler.tokens_in_flight(sequence)
        self._metrics.tokens.discarded("disconnect" if cause == "disconnect" else "abort", max(0, in_vain))
        self._scheduler.abort(sequence)
        self._send(session, last)
        self._close(session, "abort", cause, now)

    def close_all(self) -> None:
        """The engine is dead: report all that is open as failed, and the pool as empty."""
        now = time.monotonic()
        for session in list(self._open.values()):
            self._close(session, "error", None, now)
        capacity = self._scheduler.pool.capacity
        self._metrics.pool.update(PoolReport(running=0, used_blocks=0, cached_blocks=0, free_blocks=capacity))

    def _send(self, session: Session, output: Output | Exception) -> None:
        self.outbox.append((self._streams[session.request.request_id], output))

    def _close(self, session: Session, finish_reason: str, cause: AbortCause | None, now: float) -> None:
        """Forget a request that is over and report it."""
        del self._open[session.request.request_id], self._streams[session.request.request_id]
        self._deadlines.set(session.request.request_id, None)
        if session.admitted is None:
            self._admission.leave(session.request)
        elif finish_reason in ("stop", "length"):
            self._admission.ran(now - session.admitted)
        self._metrics.requests.finished(session.report(finish_reason, cause, now))

    def report_pool(self) -> None:
        """Tell the metrics how queue, batch and pool are now."""
        stats = self._scheduler.stats()
        if stats.recomputed_tokens > self._recomputed_tokens:
            self._metrics.tokens.discarded("preemption", stats.recomputed_tokens - self._recomputed_tokens)
            self._recomputed_tokens = stats.recomputed_tokens
        self._metrics.pool.update(
            PoolReport(
                running=stats.running,
                used_blocks=stats.blocks_used,
                cached_blocks=stats.blocks_cached,
                free_blocks=stats.blocks_free,
                waiting=stats.waiting_by_reason,
                waiting_tokens=self._admission.waiting_tokens,
                unused_slots=stats.unused_slots,
                preemptions=stats.preemptions,
                queried_tokens=stats.queried_tokens,
                hit_tokens=stats.hit_tokens,
                evicted_by=stats.evicted_by,
                kept_tokens=stats.kept_tokens,
                dropped_tokens=stats.dropped_tokens,
                host=stats.host,
            )
        )


def _is_past(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now


def _least(*seconds: float | None) -> float | None:
    return min((limit for limit in seconds if limit is not None), default=None)
