"""The engine: takes requests from any number of callers and runs them as one batch, step by step.

Two threads beside the caller's own loop:

    sluice-engine   an asyncio loop: take in what callers sent, plan, wait for the step, commit, make text, deliver
    sluice-device   runs the planned steps: the only thread that touches the model's device

The scheduler's state and that of the open requests (`server.sessions`) are touched by the engine's loop alone and have
no locks. Callers and engine exchange batches: each step begins by emptying the inbox and ends with one call into the
callers' loop that delivers all its outputs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from server.admission import Admission
from server.config import ServeSettings
from server.delivery import GenerationStream
from server.generation import (
    EngineStatus,
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    GrammarFailed,
    ModelCard,
    Output,
    Phase,
    RequestTooLong,
)
from server.metrics import Metrics
from server.model.errors import ModelLoadError
from server.reports import AbortCause, CacheSnapshot, StepReport
from server.scheduler.scheduler import Scheduler
from server.session import Submission
from server.sessions import Sessions
from server.step import GrammarsFailed, SequencesFailed, StepPlan, StepResult
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.startup import Started

logger = logging.getLogger(__name__)

IDLE_REPORT_SECONDS = 1.0
_LIFE = (Phase.LOADING, Phase.READY, Phase.DRAINING, Phase.DEAD)
Command: TypeAlias = Callable[[Sessions], None]
"""What callers have the engine's thread do with the open requests."""


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
        self._open_of: Counter[str] = Counter()  # how many of them are each tenant's
        self._admission: Admission | None = None  # once loaded
        self._stall_limit = 0.0
        self._step_begun: float | None = None  # when the step in progress began; None while idle
        metrics.engine.watch_step(self._step_age)
        self._inbox: deque[Command] = deque()
        self._thread = threading.Thread(target=self._main, name="sluice-engine", daemon=True)
        self._caller_loop: asyncio.AbstractEventLoop | None = None
        self._engine_loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._stopping = False
        self._idle = asyncio.Event()
        self._device = ThreadPoolExecutor(1, thread_name_prefix="sluice-device")
        self._started: Started | None = None  # once loaded
        self._sessions: Sessions | None = None  # once loaded; the engine's thread alone

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
        shares = self.settings.scheduling_policy == "fair" and bool(requests)
        own_open = self._open_of[requests[0].tenant] if shares else None
        self._admission.check(requests, len(self._open), own_open)
        streams = [GenerationStream(request.request_id, self.abort, request.tenant) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            self._admission.enter(request)
            self._open[request.request_id] = stream
            self._open_of[request.tenant] += 1
        submission = Submission(arrived=time.monotonic())
        self._post(lambda sessions: sessions.take_in(requests, streams, submission))
        return streams

    def abort(self, request_id: str, cause: AbortCause) -> None:
        """End an open request; unknown ids, and those just finished, are ignored."""
        self._post(lambda sessions: sessions.cut_off(request_id, cause))

    async def cache_snapshot(self) -> CacheSnapshot:
        """Who holds which blocks, as the engine's thread finds it between steps or during one.

        Raises EngineUnavailable while the model loads and once the engine is dead.
        """
        started = self._started
        if started is None or self._sessions is None or self._stopping or self._phase is Phase.DEAD:
            raise EngineUnavailable(self._detail, self._phase)
        answer: Future[CacheSnapshot] = Future()

        def look(_: Sessions) -> None:
            if not answer.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                if self._phase is Phase.DEAD:  # since it was asked for
                    raise EngineUnavailable(self._detail, self._phase)
                answer.set_result(started.scheduler.snapshot())
            except Exception as error:  # for whoever asked; the engine goes on
                answer.set_exception(error)

        self._post(look)
        return await asyncio.wrap_future(answer)

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
        self._post(lambda sessions: None)
        if self._phase is not Phase.LOADING and self._engine_loop is not None:
            await asyncio.to_thread(self._thread.join)
            self._device.shutdown()

    async def _until_idle(self) -> None:
        while self._open:
            self._idle.clear()
            await self._idle.wait()

    def _post(self, command: Command) -> None:
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
                self._open_of[stream.tenant] -= 1
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

        self.metrics.engine.startup("import", time.monotonic() - begun)
        self._started = start_up(self.settings, self.metrics, self._device, self._report_loading)
        self.model = self._started.card
        self.tokenizer = self._started.tokenizer
        self.metrics.engine.startup("total", time.monotonic() - begun)
        self._admission = Admission(
            self._started.scheduler.config.max_num_seqs,
            self.settings.max_queued_requests,
            self.settings.queued_tokens_limit(self.model.max_model_len),
        )
        self._sessions = Sessions(
            self._started.scheduler,
            self._admission,
            self.metrics,
            self.model,
            self.tokenizer,
            queue_timeout=self.settings.queue_timeout,
            request_timeout=self.settings.request_timeout,
        )
        self._stall_limit = self.settings.stall_limit(self._started.device_type)

    def _report_loading(self, phase: str, fraction: float) -> None:
        self._detail = f"{phase} ({fraction:.0%})"

    def _reach(self, phase: Phase, detail: str) -> None:
        """Go on to a later phase of life; a no-op where that one, or a later one, has been reached. On any thread."""
        with self._phase_lock:
            if _LIFE.index(phase) > _LIFE.index(self._phase):
                self._phase, self._detail = phase, detail
                self.metrics.engine.state(phase)

    async def _run(self) -> None:
        started, sessions = self._started, self._sessions
        assert started is not None
        assert sessions is not None
        scheduler = started.scheduler
        self._engine_loop = asyncio.get_running_loop()
        self._reach(Phase.READY, "")
        while not self._stopping:
            begun = self._step_begun = time.monotonic()
            self._attend(sessions)
            plan = scheduler.plan()
            if plan is None:
                sessions.report_pool()
                self._flush(sessions)
                self._step_begun = None
                await self._wait_for_work()
                continue
            now = time.monotonic()
            sessions.note_starts(now)
            sessions.report_pool()
            try:
                result = await self._compute(started.runner.run, plan, sessions)
            except SequencesFailed as error:
                # The others run their step again and lose nothing.
                theirs = isinstance(error, GrammarsFailed)
                logger.log(logging.WARNING if theirs else logging.ERROR, "%s", error)
                kind = GrammarFailed if theirs else GenerationFailed
                sessions.fail(scheduler.fail(error.sequences), kind, error.reason)
                sessions.report_pool()
                self._flush(sessions)
            else:
                self._finish_step(scheduler, sessions, plan, result, begun, now)
        self._attend(sessions)  # to what was asked at the last moment

    async def _compute(self, run: Callable[[StepPlan], StepResult], plan: StepPlan, sessions: Sessions) -> StepResult:
        """Run the step on the device's thread. Who gives up meanwhile, or has no time left, does not wait for its end,
        which may never come."""
        assert self._engine_loop is not None
        step = self._engine_loop.run_in_executor(self._device, run, plan)
        step.add_done_callback(lambda _: self._wake.set())
        while True:
            deadline = sessions.next_deadline
            await self._woken(None if deadline is None else deadline - time.monotonic())
            if step.done():
                return step.result()
            self._attend(sessions)
            sessions.report_pool()
            self._flush(sessions)

    def _attend(self, sessions: Sessions) -> None:
        """Do what callers have asked for since, and end the requests whose time is up."""
        self._wake.clear()
        while self._inbox:
            self._inbox.popleft()(sessions)
        sessions.end_expired()

    async def _woken(self, seconds: float | None) -> bool:
        """Wait for something to do, for so long at most; whether there may be something."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _wait_for_work(self) -> None:
        """Wait for the inbox, telling the metrics about the time in parts."""
        while not self._inbox:
            since = time.monotonic()
            woken = await self._woken(IDLE_REPORT_SECONDS)
            self.metrics.engine.idle(time.monotonic() - since)
            if woken:
                return

    def _finish_step(
        self,
        scheduler: Scheduler,
        sessions: Sessions,
        plan: StepPlan,
        result: StepResult,
        begun: float,
        planned: float,
    ) -> None:
        computed = time.monotonic()
        progress = scheduler.commit(result, plan)
        committed = time.monotonic()
        sessions.advance(progress, committed)
        sessions.report_pool()
        self._flush(sessions)
        now = time.monotonic()
        self.metrics.engine.step(
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
                copy_seconds=result.copy_seconds if plan.saves or plan.loads else None,
                compaction_seconds=result.compaction_seconds if plan.compactions else None,
            )
        )

    def _flush(self, sessions: Sessions) -> None:
        """Send the outputs of this step to the callers' loop, all in one call."""
        if sessions.outbox:
            batch, sessions.outbox = sessions.outbox, []
            assert self._caller_loop is not None
            self._caller_loop.call_soon_threadsafe(self._deliver, batch)

    def _die(self, detail: str) -> None:
        """Fail every open request; the server stays up to say so."""
        self._reach(Phase.DEAD, detail)
        self._step_begun = None
        if self._sessions is not None:
            self._flush(self._sessions)  # what was finished before stays finished
        assert self._caller_loop is not None
        self._caller_loop.call_soon_threadsafe(self._bury, detail)

    def _bury(self, detail: str) -> None:
        """Fail all requests, those sent at the last moment included, and report them. On the callers' loop, where no
        more are sent, once the engine's thread leaves its state alone."""
        message = f"the engine has failed: {detail}"
        self._deliver([(stream, GenerationFailed(message)) for stream in self._open.values()])
        if self._sessions is None:
            return
        while self._inbox:
            try:
                self._inbox.popleft()(self._sessions)
            except Exception:
                logger.exception("a request could not be taken in")
        self._sessions.close_all()
