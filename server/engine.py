"""The engine: takes requests from any number of callers and runs them as one batch, step by step.

Two threads beside the caller's own loop:

    sluice-engine   an asyncio loop: take in what callers sent, plan, wait for the step, commit, make text, deliver
    sluice-device   runs the planned steps: the only thread that touches the model's device

The scheduler's state is touched by the engine's loop alone and has no locks. Callers and engine exchange batches: each
step begins by emptying the inbox and ends with one call into the callers' loop that delivers all its outputs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from server.admission import Admission
from server.config import ServeSettings
from server.deadlines import Deadlines
from server.delivery import GenerationStream
from server.generation import (
    DeadlineExceeded,
    EngineError,
    EngineStatus,
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    ModelCard,
    Output,
    Phase,
    QueueTimeout,
    RequestTooLong,
)
from server.metrics import Metrics
from server.model.errors import ModelLoadError
from server.reports import AbortCause, PoolReport, StepReport
from server.scheduler.request import Request
from server.scheduler.scheduler import Progress, Scheduler
from server.session import Session, Submission
from server.step import ConstraintFailed, SequencesFailed, StepPlan, StepResult
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.startup import Started

logger = logging.getLogger(__name__)

IDLE_REPORT_SECONDS = 1.0
_LIFE = (Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.DEAD)


class AsyncEngine:
    """The facade HTTP sees. Everything public is called on one asyncio loop, the one that called `start`."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.model: ModelCard | None = None
        self.tokenizer: Tokenizer | None = None
        self._phase = Phase.LOADING
        self._phase_lock = threading.Lock()
        self._detail = "starting"
        self._open: dict[str, GenerationStream] = {}
        self._admission: Admission | None = None  # once loaded
        self._stall_limit = 0.0
        self._step_begun: float | None = None  # when the step in progress began; None while idle
        metrics.watch_step(self._step_age)
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread = threading.Thread(target=self._main, name="sluice-engine", daemon=True)
        self._caller_loop: asyncio.AbstractEventLoop | None = None
        self._engine_loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._idle = asyncio.Event()
        # Below: the engine's thread alone.
        self._started: Started | None = None
        self._sessions: dict[str, Session] = {}
        self._device = ThreadPoolExecutor(1, thread_name_prefix="sluice-device")
        self._streams: dict[str, GenerationStream] = {}
        self._deadlines = Deadlines()
        self._outbox: list[tuple[GenerationStream, Output | Exception]] = []
        self._recomputed_tokens = 0

    # Callers' side

    @property
    def status(self) -> EngineStatus:
        """How the engine is, as it says itself or, should its thread hang, as it can be seen from outside."""
        started, admission = self._started, self._admission
        if started is None or admission is None or self._phase is Phase.DEAD:
            return EngineStatus(self._phase, self._detail, waiting=len(self._open))
        running = len(started.scheduler.running)
        pool = started.scheduler.pool
        age = self._step_age()
        return EngineStatus(
            self._phase,
            self._detail,
            running=running,
            waiting=max(0, len(self._open) - running),
            waiting_tokens=admission.waiting_tokens,
            kv_usage=pool.num_used / pool.capacity,
            max_num_seqs=admission.max_num_seqs,
            max_queued_requests=admission.max_queued_requests,
            max_queued_tokens=admission.max_queued_tokens,
            stalled_seconds=age if age > self._stall_limit else 0.0,
        )

    def _step_age(self) -> float:
        """Seconds since the step in progress began; 0 when there is none. On any thread."""
        begun = self._step_begun
        return 0.0 if begun is None else time.monotonic() - begun

    async def start(self) -> None:
        """Begin to load; returns at once. `status` tells how far it is."""
        self._caller_loop = asyncio.get_running_loop()
        self._thread.start()

    def check_room(self, more: int) -> None:
        """Raises QueueFull if `more` sequences could not be submitted now, however short they are."""
        if self._admission is not None:
            self._admission.check_room(len(self._open), more)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationStream]:
        """Queue requests, all of them or none.

        Raises EngineUnavailable, QueueFull, BodyTooLarge or RequestTooLong; after it has returned, failures come from
        the streams.
        """
        if self._phase is not Phase.READY:
            raise EngineUnavailable(self._detail, self._phase)
        assert self.model is not None
        assert self._admission is not None
        for request in requests:
            length = len(request.prompt_ids) + request.max_tokens
            if length > self.model.max_model_len:
                raise RequestTooLong(
                    f"{len(request.prompt_ids)} prompt tokens and {request.max_tokens} more are {length}, "
                    f"the limit is {self.model.max_model_len} ({self.model.limited_by})"
                )
            if request.request_id in self._open:
                raise ValueError(f"request id {request.request_id!r} is in use")
        self._admission.check(requests, len(self._open))
        streams = [GenerationStream(request.request_id, self.abort) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            self._admission.enter(request)
            self._open[request.request_id] = stream
        submission = Submission(arrived=time.monotonic())
        self._post(lambda: self._take_in(requests, streams, submission))
        return streams

    def abort(self, request_id: str, cause: AbortCause) -> None:
        """End an open request; unknown ids, and those just finished, are ignored."""
        self._post(lambda: self._cut_off(request_id, cause))

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and let the open ones finish; abort those that have not after `timeout` seconds.

        Returns whether all finished by themselves.
        """
        self._reach(Phase.DRAINING, "shutting down")
        try:
            await asyncio.wait_for(self._until_idle(), timeout)
        except TimeoutError:
            for request_id in list(self._open):
                self.abort(request_id, "shutdown")
            await self._until_idle()
            return False
        return True

    async def stop(self) -> None:
        """End the engine's threads. Open requests should have been drained."""
        self._stopping = True
        self._post(lambda: None)
        if self._phase is not Phase.LOADING and self._engine_loop is not None:
            await asyncio.to_thread(self._thread.join)
            self._device.shutdown()

    async def _until_idle(self) -> None:
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    def _post(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run `command` before its next step."""
        self._inbox.append(command)
        loop = self._engine_loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                logger.debug("the engine's loop has ended")

    def _deliver(self, batch: list[tuple[GenerationStream, Output | Exception]]) -> None:
        for stream, output in batch:
            stream.deliver(output)
            if isinstance(output, Exception) or output.finish_reason is not None:
                del self._open[stream.request_id]
        if not self._open:
            self._idle.set()

    # The engine's thread

    def _main(self) -> None:
        try:
            self._load()
            asyncio.run(self._run())
        except ModelLoadError as error:
            self._die(str(error))
        except BaseException as error:  # whatever ends this thread: a caller that waits must learn of it
            logger.exception("the engine has failed")
            self._die(f"{type(error).__name__}: {error}")

    def _load(self) -> None:
        begun = time.monotonic()
        self._detail = "importing torch"
        # Threads that spin between operations make a step several times slower as soon as anything else wants a core,
        # and save nothing when nothing does. OpenMP reads this when torch is first imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from server.startup import start_up  # takes seconds: not before the port answers

        self.metrics.startup("import", time.monotonic() - begun)
        self._started = start_up(self.settings, self.metrics, self._device, self._report_loading)
        self.model = self._started.card
        self.tokenizer = self._started.tokenizer
        self.metrics.startup("total", time.monotonic() - begun)
        self._admission = Admission(
            self._started.scheduler.config.max_num_seqs,
            self.settings.max_queued_requests,
            self.settings.queued_tokens_limit(self.model.max_model_len),
        )
        self._stall_limit = self.settings.stall_limit(self._started.device_type)

    def _report_loading(self, phase: str, fraction: float) -> None:
        self._detail = f"{phase} ({fraction:.0%})"

    def _reach(self, phase: Phase, detail: str) -> None:
        """Go on to a later phase of life; a no-op where that one, or a later one, has been reached. On any thread."""
        with self._phase_lock:
            if _LIFE.index(phase) > _LIFE.index(self._phase):
                self._phase, self._detail = phase, detail
                self.metrics.state(phase)

    async def _run(self) -> None:
        started = self._started
        assert started is not None
        scheduler = started.scheduler
        self._engine_loop = asyncio.get_running_loop()
        self._reach(Phase.READY, "")
        while not self._stopping:
            begun = self._step_begun = time.monotonic()
            self._attend()
            plan = scheduler.plan()
            if plan is None:
                self._report_pool(scheduler)
                self._flush()
                self._step_begun = None
                await self._wait_for_work()
                continue
            now = time.monotonic()
            for sequence in scheduler.admitted:
                self._note_start(self._sessions[sequence.request_id], now)
            self._report_pool(scheduler)
            try:
                result = await self._compute(started.runner.run, plan)
            except SequencesFailed as error:
                self._fail(scheduler, error)
            else:
                self._finish_step(scheduler, plan, result, begun, now)

    async def _compute(self, run: Callable[[StepPlan], StepResult], plan: StepPlan) -> StepResult:
        """Run the step on the device's thread. Who gives up meanwhile, or has no time left, does not wait for its end,
        which may never come."""
        assert self._engine_loop is not None
        assert self._started is not None
        step = self._engine_loop.run_in_executor(self._device, run, plan)
        step.add_done_callback(lambda _: self._wake.set())
        while True:
            deadline = self._deadlines.next
            await self._woken(None if deadline is None else deadline - time.monotonic())
            if step.done():
                return step.result()
            self._attend()
            self._report_pool(self._started.scheduler)
            self._flush()

    def _attend(self) -> None:
        """Do what callers have asked for since, and end the requests whose time is up."""
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()()
        self._end_expired()

    async def _woken(self, seconds: float | None) -> bool:
        """Wait for something to do, for so long at most; whether there may be something."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _note_start(self, session: Session, now: float) -> None:
        assert self._admission is not None
        session.admitted = now
        session.submission.started = True
        self._streams[session.request.request_id].queue_seconds = now - session.arrived
        self._admission.leave(session.request)
        if session.queue_deadline is not None:
            self._deadlines.set(session.request.request_id, session.deadline)

    def _end_expired(self) -> None:
        """End the requests whose time is up."""
        now = time.monotonic()
        for request_id in self._deadlines.passed(now):
            session = self._sessions[request_id]
            if _is_past(session.queue_deadline, now) and not session.submission.started:
                self._time_out(session, now)
            elif _is_past(session.deadline, now):
                self._run_out(session, now)
            else:  # a sibling has started, so the work has begun
                self._deadlines.set(request_id, session.deadline)

    def _time_out(self, session: Session, now: float) -> None:
        """End a request that did not start in time."""
        assert self._started is not None
        assert self._admission is not None
        assert session.queue_deadline is not None
        failure = QueueTimeout(
            f"The request did not start within {session.queue_deadline - session.arrived:g} seconds "
            "('queue_timeout', --queue-timeout); the server is busy, try again later.",
            self._admission.retry_after(len(self._started.scheduler.waiting)),
        )
        self._end_early(session, failure, "queue_timeout", now)

    def _run_out(self, session: Session, now: float) -> None:
        """End a request that has had its time, with what it has; without anything, with an error."""
        assert session.deadline is not None
        has_scores = session.request.prompt_logprobs is None or session.first_token is not None
        if session.submission.answered and has_scores:
            output = session.run_out()
            self.metrics.generated(len(output.tokens))
            self._end_early(session, output, "deadline", now)
            return
        failure = DeadlineExceeded(
            f"The request had no output after {session.deadline - session.arrived:g} seconds "
            "('request_timeout', --request-timeout)."
        )
        self._end_early(session, failure, "deadline", now)

    def _end_early(self, session: Session, last: Output | EngineError, cause: AbortCause, now: float) -> None:
        """End a request before it is complete; `last` is what its caller gets."""
        assert self._started is not None
        scheduler, sequence = self._started.scheduler, session.sequence
        in_vain = session.num_held
        if session.first_token is None:
            in_vain = sequence.num_computed - sequence.num_cached + scheduler.tokens_in_flight(sequence)
        self.metrics.discarded("disconnect" if cause == "disconnect" else "abort", max(0, in_vain))
        scheduler.abort(sequence)
        self._outbox.append((self._streams[session.request.request_id], last))
        self._close(session, "abort", cause, now)

    async def _wait_for_work(self) -> None:
        """Wait for the inbox, telling the metrics about the time in parts."""
        while not self._inbox:
            since = time.monotonic()
            woken = await self._woken(IDLE_REPORT_SECONDS)
            self.metrics.idle(time.monotonic() - since)
            if woken:
                return

    def _finish_step(
        self, scheduler: Scheduler, plan: StepPlan, result: StepResult, begun: float, planned: float
    ) -> None:
        computed = time.monotonic()
        progress = scheduler.commit(result, plan)
        committed = time.monotonic()
        released = 0
        for item in progress:
            released += self._advance(scheduler, item, committed)
        if released:
            self.metrics.generated(released)
        self._report_pool(scheduler)
        self._flush()
        now = time.monotonic()
        self.metrics.step(
            StepReport(
                prefill_requests=plan.num_sequences - plan.num_decodes,
                prefill_tokens=plan.num_tokens - plan.num_decodes,
                decode_requests=plan.num_decodes,
                decode_tokens=plan.num_decodes,
                duration_seconds=now - begun,
                schedule_seconds=planned - begun + committed - computed,
                forward_seconds=result.forward_seconds,
                sample_seconds=result.sample_seconds,
                detokenize_seconds=now - committed,
            )
        )

    def _fail(self, scheduler: Scheduler, error: SequencesFailed) -> None:
        """End the requests that cannot be continued; the others run their step again and lose nothing."""
        logger.error("%s", error)
        for sequence in scheduler.fail(error.sequences):
            self._fail_one(self._sessions[sequence.request_id], error.reason)
        self._report_pool(scheduler)
        self._flush()

    def _fail_one(self, session: Session, reason: str) -> None:
        """End a request that the scheduler has let go of."""
        self._outbox.append((self._streams[session.request.request_id], GenerationFailed(reason)))
        self.metrics.discarded("error", session.num_held)
        self._close(session, "error", None, time.monotonic())

    def _advance(self, scheduler: Scheduler, progress: Progress, now: float) -> int:
        """Make and send the output of one request's progress; returns how many tokens became certain."""
        assert self._started is not None
        session = self._sessions[progress.request.request_id]
        if not session.prompt_counted and (progress.token_id is not None or progress.finish_reason is not None):
            session.prompt_counted = True
            if session.sequence.leader is None:  # siblings share one prompt, which usage counts once
                self.metrics.prompt_computed(progress.request.num_prompt, progress.request.num_cached)
        if progress.token_id is not None:
            session.submission.answered = True
            if session.first_token is None:
                session.first_token = now
                self.metrics.first_token(now - session.arrived)
            else:
                assert session.last_token is not None
                self.metrics.inter_token(now - session.last_token)
            session.last_token = now
        try:
            output = session.advance(progress, self._started.tokenizer, self._started.card.eos_token_ids)
        except Exception as error:  # whatever a grammar or a tokenizer does, the neighbours go on
            if isinstance(error, ConstraintFailed):
                reason = str(error)
                logger.error("request %s: %s", session.request.request_id, reason)
            else:
                reason = "the output of this request could not be processed (see the server's log)"
                logger.exception("request %s failed", session.request.request_id)
            if progress.finish_reason is None:
                scheduler.abort(progress.request)
            self._fail_one(session, reason)
            return 0
        if output is None:
            return 0
        session.submission.answered = True
        self._outbox.append((self._streams[session.request.request_id], output))
        if output.finish_reason is not None:
            if progress.finish_reason is None:
                scheduler.abort(progress.request)  # a stop string, which the scheduler does not know of
            self._close(session, output.finish_reason, None, now)
        return len(output.tokens)

    def _take_in(
        self, requests: Sequence[GenerationRequest], streams: Sequence[GenerationStream], submission: Submission
    ) -> None:
        for request, stream in zip(requests, streams, strict=True):
            session = self._open_session(request, submission)
            self._sessions[request.request_id] = session
            self._streams[request.request_id] = stream
            self._deadlines.set(request.request_id, _least(session.queue_deadline, session.deadline))

    def _open_session(self, request: GenerationRequest, submission: Submission) -> Session:
        assert self._started is not None
        leader = self._sessions.get(request.leader) if request.leader is not None else None
        sequence = Request(
            request.request_id,
            request.prompt_ids,
            request.params,
            request.max_tokens,
            priority=request.priority,
            salt=request.cache_salt,
            read_cache=request.read_cache,
            prompt_logprobs=request.prompt_logprobs,
            leader=leader.sequence if leader is not None else None,
            constraint=request.constraint,
            tenant=request.tenant,
        )
        self._started.scheduler.add(sequence)
        queue_timeout = _least(request.queue_timeout, self.settings.queue_timeout)
        timeout = _least(request.timeout, self.settings.request_timeout)
        return Session(request, sequence, submission, queue_timeout, timeout)

    def _cut_off(self, request_id: str, cause: AbortCause) -> None:
        session = self._sessions.get(request_id)
        if session is not None:
            self._end_early(session, session.cut_off(), cause, time.monotonic())

    def _close(self, session: Session, finish_reason: str, cause: AbortCause | None, now: float) -> None:
        """Forget a request that is over and report it."""
        assert self._admission is not None
        del self._sessions[session.request.request_id], self._streams[session.request.request_id]
        self._deadlines.set(session.request.request_id, None)
        if session.admitted is None:
            self._admission.leave(session.request)
        elif finish_reason in ("stop", "length"):
            self._admission.ran(now - session.admitted)
        self.metrics.finished(session.report(finish_reason, cause, now))

    def _report_pool(self, scheduler: Scheduler) -> None:
        assert self._admission is not None
        stats = scheduler.stats()
        if stats.recomputed_tokens > self._recomputed_tokens:
            self.metrics.discarded("preemption", stats.recomputed_tokens - self._recomputed_tokens)
            self._recomputed_tokens = stats.recomputed_tokens
        self.metrics.pool(
            PoolReport(
                running=stats.running,
                used_blocks=stats.blocks_used,
                cached_blocks=stats.blocks_cached,
                free_blocks=stats.blocks_free,
                waiting=stats.waiting_by_reason,
                waiting_tokens=self._admission.waiting_tokens,
                evicted_blocks=stats.evicted_blocks,
                preemptions=stats.preemptions,
                queried_tokens=stats.queried_tokens,
                hit_tokens=stats.hit_tokens,
            )
        )

    def _flush(self) -> None:
        """Send the outputs of this step to the callers' loop, all in one call."""
        if self._outbox:
            batch, self._outbox = self._outbox, []
            assert self._caller_loop is not None
            self._caller_loop.call_soon_threadsafe(self._deliver, batch)

    def _die(self, detail: str) -> None:
        """Fail every open request; the server stays up to say so."""
        self._reach(Phase.DEAD, detail)
        self._step_begun = None
        self._flush()  # what was finished before stays finished
        assert self._caller_loop is not None
        self._caller_loop.call_soon_threadsafe(self._bury, detail)

    def _bury(self, detail: str) -> None:
        """Fail all requests, those sent at the last moment included, and report them. On the callers' loop, where no
        more are sent, once the engine's thread leaves its state alone."""
        message = f"the engine has failed: {detail}"
        self._deliver([(stream, GenerationFailed(message)) for stream in self._open.values()])
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:
                logger.exception("a request could not be taken in")
        now = time.monotonic()
        for session in list(self._sessions.values()):
            self._close(session, "error", None, now)
        capacity = self._started.scheduler.pool.capacity if self._started is not None else 0
        self.metrics.pool(PoolReport(running=0, used_blocks=0, cached_blocks=0, free_blocks=capacity))


def _is_past(deadline: float | None, now: float) -> bool:
    return deadline is not None and deadline <= now


def _least(*seconds: float | None) -> float | None:
    return min((limit for limit in seconds if limit is not None), default=None)
