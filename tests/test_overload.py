"""The engine under too much work or too little time: bounds, deadlines, hangs, and books that balance."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from server.api.errors import APIError
from server.api.exchange import Exchange
from server.api.generation import Generation
from server.api.service import Service
from server.generation import (
    DeadlineExceeded,
    GenerationFailed,
    GenerationRequest,
    Phase,
    QueueFull,
    QueueTimeout,
)
from server.step import ConstraintFailed, Int32Array, SamplingParams, StepPlan, StepResult
from tests.engine_harness import FORCED, Harness, collect, text_of
from tests.tiny_checkpoint import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


Start = Callable[..., Any]


@pytest.fixture
async def start(checkpoint: Path) -> AsyncIterator[Start]:
    started: list[Harness] = []

    async def make(**options: Any) -> Harness:
        started.append(Harness(checkpoint, **options))
        await started[-1].ready()
        return started[-1]

    yield make
    for harness in started:
        await harness.engine.drain(0.0)
        await harness.engine.stop()


class Gate:
    """Holds every step back until `open`; counts those that came. Tests close it by making it."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        started = harness.engine._started
        assert started is not None
        self._run = started.runner.run
        self._may_go = threading.Event()
        self.came = threading.Event()
        self.plans: list[StepPlan] = []
        monkeypatch.setattr(started.runner, "run", self._held)

    def _held(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.came.set()
        assert self._may_go.wait(20)
        return self._run(plan)

    async def in_step(self) -> None:
        assert await asyncio.to_thread(self.came.wait, 10)

    def open(self) -> None:
        self._may_go.set()


def slow_down(harness: Harness, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.005) -> None:
    """Let every step take at least so long: 500 tokens take 2.5 seconds."""
    started = harness.engine._started
    assert started is not None
    run = started.runner.run

    def slow(plan: StepPlan) -> StepResult:
        time.sleep(seconds)
        return run(plan)

    monkeypatch.setattr(started.runner, "run", slow)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


# The queue


async def test_the_queue_is_bounded_in_tokens_and_empties_as_prompts_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await start(max_num_seqs=1, max_num_batched_tokens=64, max_queued_tokens=1024, kv_blocks=80)
    gate = Gate(harness, monkeypatch)
    streams = [harness.submit(harness.request(max_tokens=1))]
    await gate.in_step()
    streams += [harness.submit(harness.request((5,) * 400, max_tokens=1)) for _ in range(2)]
    assert harness.engine.status.waiting_tokens == 800
    with pytest.raises(QueueFull, match=r"800 prompt tokens are waiting and 300 more.*--max-queued-tokens") as full:
        harness.submit(harness.request((6,) * 300))
    assert full.value.reason == "queue_tokens"
    streams.append(harness.submit(harness.request((7,) * 224, max_tokens=1)))
    with pytest.raises(QueueFull):
        harness.engine.check_room(1)
    streams[1].close()
    gate.open()
    await asyncio.gather(*map(collect, streams))
    await harness.settled()
    assert harness.engine.status.waiting_tokens == 0
    assert harness.value("requests_waiting_tokens") == 0
    harness.engine.check_room(1)


async def test_the_status_tells_load_and_limits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(max_num_seqs=2, max_num_batched_tokens=32, max_queued_requests=7, max_queued_tokens=5000)
    gate = Gate(harness, monkeypatch)
    streams = harness.engine.submit([harness.request((i,) * 17, max_tokens=4) for i in range(5)])
    await gate.in_step()
    status = harness.engine.status
    assert (status.running, status.waiting, status.waiting_tokens) == (2, 3, 51)
    assert (status.max_num_seqs, status.max_queued_requests, status.max_queued_tokens) == (2, 7, 5000)
    assert status.kv_usage == 4 / 64
    assert status.stalled_seconds == 0
    gate.open()
    await asyncio.gather(*map(collect, streams))
    await harness.settled()
    assert harness.engine.status.kv_usage == 0


# Deadlines


async def test_what_does_not_start_in_time_fails_before_any_work_is_done(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32)
    slow_down(harness, monkeypatch)
    busy = harness.submit(harness.request(max_tokens=500))
    await anext(busy)
    late = harness.submit(harness.request((9,) * 20, queue_timeout=0.05))
    with within(2.0), pytest.raises(QueueTimeout, match=r"within 0.05 seconds.*--queue-timeout") as timed_out:
        await collect(late)
    assert timed_out.value.retry_after >= 1
    busy.close()
    await harness.settled()
    assert harness.value("prompt_tokens_total") == 3
    assert harness.value("request_aborts_total", cause="queue_timeout") == 1
    assert harness.engine.status.waiting_tokens == 0


async def test_a_preempted_request_has_started_and_so_have_its_siblings(start: Start) -> None:
    """Four blocks for two sequences that need three each: one is preempted and waits, but not to start."""
    harness = await start(kv_blocks=5, max_num_seqs=2, max_num_batched_tokens=32)
    requests = [harness.request((i,) * 16, max_tokens=48, queue_timeout=0.01) for i in range(4)]
    answers = await asyncio.gather(*map(collect, harness.engine.submit(requests)))
    assert [answer[-1].usage.completion_tokens for answer in answers] == [48] * 4
    assert harness.value("preemptions_total") >= 1


async def test_time_that_is_up_ends_the_answer_with_what_there_is(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is held back because a stop string may be beginning is shown, too."""
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32)
    letter = text_of(await collect(harness.submit(harness.request(max_tokens=1))))
    slow_down(harness, monkeypatch)
    request = harness.request(max_tokens=500, timeout=0.3, stop=(letter * 501,))
    outputs = await collect(harness.submit(request))
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("length", "deadline")
    count = outputs[-1].usage.completion_tokens
    assert 0 < count < 100
    assert text_of(outputs) == letter * count
    assert sum(len(output.tokens) for output in outputs) == count
    await harness.settled()
    assert harness.value("request_aborts_total", cause="deadline") == 1
    assert harness.value("requests_total", endpoint="completions", finish_reason="abort") == 1
    assert harness.value("generation_tokens_total") == count + 1
    assert harness.value("discarded_tokens_total", reason="abort") == 0


async def test_time_that_is_up_before_the_first_token_is_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a step hangs: who has waited long enough is told so."""
    harness = await start()
    gate = Gate(harness, monkeypatch)
    stream = harness.submit(harness.request(timeout=0.1))
    await gate.in_step()
    with within(2.0), pytest.raises(DeadlineExceeded, match=r"after 0.1 seconds.*--request-timeout"):
        await collect(stream)
    gate.open()
    await harness.settled()
    assert harness.value("request_aborts_total", cause="deadline_empty") == 1
    assert text_of(await collect(harness.submit(harness.request(max_tokens=2))))


async def test_one_answer_among_many_saves_the_others_from_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a body with several prompts, those that had no turn end empty beside the one that has text."""
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32)
    slow_down(harness, monkeypatch)
    requests = [harness.request((i,) * 4, max_tokens=500, timeout=0.3) for i in range(3)]
    first, *others = await asyncio.gather(*map(collect, harness.engine.submit(requests)))
    assert text_of(first)
    for outputs in (first, *others):
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("length", "deadline")
    assert [outputs[-1].usage.completion_tokens for outputs in others] == [0, 0]


async def test_a_request_that_started_in_time_still_ends_in_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time to start passes first, while it or a sibling runs."""
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32)
    slow_down(harness, monkeypatch)
    requests = [harness.request((i,) * 4, max_tokens=500, queue_timeout=0.1, timeout=0.3) for i in range(2)]
    with within(2.0):
        answers = await asyncio.gather(*map(collect, harness.engine.submit(requests)))
    assert [answer[-1].stop_reason for answer in answers] == ["deadline"] * 2


async def test_a_prompt_without_its_scores_is_no_answer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32)
    slow_down(harness, monkeypatch)
    first = harness.request(max_tokens=500, timeout=0.3)
    scored = harness.request((5,) * 40, timeout=0.3, prompt_logprobs=1)
    answered, failed = harness.engine.submit([first, scored])
    assert (await collect(answered))[-1].stop_reason == "deadline"
    with pytest.raises(DeadlineExceeded):
        await collect(failed)


async def test_the_smaller_of_flag_and_field_counts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32, queue_timeout=0.1, request_timeout=1.0)
    slow_down(harness, monkeypatch)
    busy = harness.submit(harness.request(max_tokens=500, timeout=70.0))
    await anext(busy)
    for field, told in ((50.0, "0.1 seconds"), (0.05, "0.05 seconds"), (None, "0.1 seconds")):
        with pytest.raises(QueueTimeout, match=told):
            await collect(harness.submit(harness.request(queue_timeout=field)))
    assert (await collect(busy))[-1].stop_reason == "deadline"


# Shares


async def test_a_modest_tenant_does_not_wait_for_a_greedy_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(scheduling_policy="fair", max_num_seqs=1, max_num_batched_tokens=32)
    gate = Gate(harness, monkeypatch)
    order: list[str] = []

    async def answered(tenant: str) -> None:
        await collect(harness.submit(harness.request(max_tokens=5, tenant=tenant)))
        order.append(tenant)

    tasks = [asyncio.create_task(answered("greedy")) for _ in range(6)]
    await gate.in_step()
    tasks.append(asyncio.create_task(answered("modest")))
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(*tasks)
    assert order.index("modest") <= 2


async def test_a_greedy_tenant_leaves_room_in_the_queue(start: Start) -> None:
    harness = await start(scheduling_policy="fair", max_num_seqs=1, max_num_batched_tokens=32, max_queued_requests=9)
    for _ in range(2):  # what has ended counts no more
        greedy = [harness.submit(harness.request(tenant="greedy")) for _ in range(5)]
        with pytest.raises(QueueFull, match="of this API key"):
            harness.submit(harness.request(tenant="greedy"))
        modest = harness.submit(harness.request(tenant="modest"))
        for stream in (*greedy, modest):
            await collect(stream)


# Hangs


async def test_a_step_that_hangs_shows_and_its_end_does_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(stall_timeout=0.2)
    gate = Gate(harness, monkeypatch)
    stream = harness.submit(harness.request(max_tokens=4))
    await gate.in_step()
    assert harness.engine.status.stalled_seconds == 0
    async with asyncio.timeout(5):
        while not harness.engine.status.stalled_seconds:
            await asyncio.sleep(0.02)
    assert harness.engine.status.stalled_seconds > 0.2
    assert harness.engine.status.phase is Phase.READY
    assert harness.value("engine_step_age_seconds") > 0.2
    gate.open()
    assert (await collect(stream))[-1].finish_reason == "length"
    await harness.settled()
    await asyncio.sleep(0.3)  # idle for longer than a step may take
    assert harness.engine.status.stalled_seconds == harness.value("engine_step_age_seconds") == 0


async def test_a_step_that_hangs_holds_up_nobody_who_gives_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the step has begun runs out of time, is aborted and is drained all the same."""
    harness = await start(max_num_seqs=1, max_num_batched_tokens=64)
    gate = Gate(harness, monkeypatch)
    in_step, waiting = harness.submit(harness.request((2,) * 40)), harness.submit(harness.request((3,) * 50))
    await gate.in_step()
    with within(2.0), pytest.raises(QueueTimeout):
        await collect(harness.submit(harness.request(queue_timeout=0.1)))
    with within(2.0), pytest.raises(DeadlineExceeded):
        await collect(harness.submit(harness.request(timeout=0.1)))
    assert harness.value("requests_waiting") == 1
    assert harness.value("requests_running") == 1
    in_step.close()
    async with asyncio.timeout(2.0):
        while harness.value("requests_running"):
            await asyncio.sleep(0.01)
    assert harness.value("discarded_tokens_total", reason="disconnect") == 40
    with within(2.0):
        assert not await harness.engine.drain(0.1)
    assert (await collect(waiting))[-1].finish_reason == "abort"
    assert not harness.engine._open
    gate.open()
    await harness.settled()
    assert len(gate.plans) == 1
    assert harness.engine.status.waiting_tokens == 0


async def test_a_busy_engine_is_not_stalled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(stall_timeout=0.5)
    slow_down(harness, monkeypatch)
    streams = [harness.submit(harness.request((1,), max_tokens=511)) for _ in range(4)]
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert harness.engine.status.stalled_seconds == 0
        await asyncio.sleep(0.01)
    for stream in streams:
        stream.close()
    await asyncio.gather(*tasks)


async def test_the_death_of_the_engine_shows_within_a_second(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start()
    stream = harness.submit(harness.request(max_tokens=500))
    await anext(stream)

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("gone")

    monkeypatch.setattr(harness.engine._started.runner, "run", fail)
    with within(1.0), pytest.raises(GenerationFailed, match="gone"):
        await collect(stream)
    assert harness.engine.status.phase is Phase.DEAD


async def test_what_is_sent_at_the_moment_of_death_fails_and_is_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await start()
    gate = Gate(harness, monkeypatch)
    first = harness.submit(harness.request())
    await gate.in_step()

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("gone")

    def check(requests: list[GenerationRequest], num_open: int, own_open: int | None) -> None:
        gate.open()
        harness.engine._thread.join(10)
        assert harness.engine.status.phase is Phase.DEAD

    gate._run = fail
    monkeypatch.setattr(harness.engine._admission, "check", check)
    last = harness.submit(harness.request())
    for stream in (first, last):
        with within(1.0), pytest.raises(GenerationFailed, match="gone"):
            await collect(stream)
    assert harness.value("requests_total", endpoint="completions", finish_reason="error") == 2
    assert harness.value("requests_running") == harness.value("requests_waiting") == 0


# Neighbours


class Broken:
    """A constraint that permits everything until one of its methods raises."""

    finished = False

    def __init__(self, method: str, error: Exception, after: int = 2) -> None:
        self.method, self.error, self.left = method, error, after

    def _use(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def fill_mask(self, mask: Int32Array) -> None:
        self._use("fill_mask")
        mask[:] = -1

    def accept(self, token_id: int) -> None:
        self._use("accept")


@pytest.mark.parametrize("method", ["fill_mask", "accept"])
@pytest.mark.parametrize("error", [ConstraintFailed("too complex"), RuntimeError("a fault of the library")])
@pytest.mark.parametrize("max_tokens", [3, 8])
async def test_a_grammar_that_fails_ends_its_own_request_alone(
    start: Start, method: str, error: Exception, max_tokens: int
) -> None:
    harness = await start()
    good = [harness.submit(harness.request((i,) * 5, max_tokens=40)) for i in range(2)]
    bad = harness.submit(harness.request((9,) * 20, max_tokens=max_tokens, constraint=Broken(method, error)))
    with pytest.raises(GenerationFailed, match=r"too complex|server's log"):
        await collect(bad)
    for outputs in await asyncio.gather(*map(collect, good)):
        assert [token.token_id for output in outputs for token in output.tokens] == [65] * 40
    await harness.settled()
    assert harness.value("requests_total", endpoint="completions", finish_reason="error") == 1
    assert harness.value("generation_tokens_total") == 82
    assert harness.engine.status.phase is Phase.READY


# Bodies of several sequences


async def test_an_abort_by_id_reaches_the_reader_who_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start()
    gate = Gate(harness, monkeypatch)
    service = Service(harness.engine, harness.metrics, harness.engine.settings)
    generation = Generation(service, Exchange("x"), [harness.request() for _ in range(2)], 2)
    reading = asyncio.create_task(anext(generation.outputs()))
    await gate.in_step()
    assert len(generation.abort()) == 2
    with within(2.0), pytest.raises(APIError) as ended:
        await reading
    assert (ended.value.status, ended.value.code) == (410, "aborted")
    gate.open()
    await harness.settled()
    assert harness.value("request_aborts_total", cause="api") == 2


async def test_a_body_has_waited_until_its_first_sequence_began(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(max_num_seqs=1, max_num_batched_tokens=32)
    slow_down(harness, monkeypatch)
    service, exchange = Service(harness.engine, harness.metrics, harness.engine.settings), Exchange("x")
    generation = Generation(service, exchange, [harness.request((i,), max_tokens=20) for i in range(2)], 2)
    async for _ in generation.outputs():
        pass
    generation.close()
    first, second = (stream.queue_seconds for stream in generation._streams)
    assert first is not None
    assert second is not None
    assert second > first + 0.1
    assert exchange.notes["queue_ms"] == round(first * 1000, 1)


# Books


async def test_received_is_finished_refused_running_and_waiting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ends of every kind at once: length, stop, deadlines, disconnects, aborts by id, refusals."""
    harness = await start(max_num_seqs=3, max_num_batched_tokens=64, max_queued_requests=20, max_queued_tokens=1024)
    slow_down(harness, monkeypatch, 0.002)
    service = Service(harness.engine, harness.metrics, harness.engine.settings)
    rng = random.Random(5)
    sent = 0

    def requests(count: int) -> list[GenerationRequest]:
        fields: dict[str, Any] = {
            "max_tokens": rng.choice((0, 3, 60, 400)),
            "params": rng.choice((FORCED, SamplingParams(seed=1, stop_token_ids=frozenset(range(64))))),
            "queue_timeout": rng.choice((None, None, 0.02)),
            "timeout": rng.choice((None, 0.05, 0.3)),
            "endpoint": rng.choice(("completions", "chat", "responses", "messages")),
        }
        length = rng.choice((1, 40, 120))
        first = harness.request((rng.randrange(100),) * length, **fields)
        rest = [harness.request(first.prompt_ids, leader=first.request_id, **fields) for _ in range(count - 1)]
        return [first, *rest]

    async def client() -> None:
        nonlocal sent
        count = rng.choice((1, 1, 1, 3))
        try:
            generation = Generation(service, Exchange(f"x{sent}"), requests(count), count)
        except APIError:
            sent += 1
            return
        sent += count
        patience = rng.choice((None, None, 0.0, 0.03))
        try:
            async with asyncio.timeout(patience):
                async for _ in generation.outputs():
                    if rng.random() < 0.005:
                        generation.abort()
        except (APIError, TimeoutError):
            pass
        finally:
            generation.close()

    clients = []
    for _ in range(120):
        clients.append(asyncio.create_task(client()))
        await asyncio.sleep(rng.choice((0, 0, 0.01, 0.05)))
    await asyncio.gather(*clients)
    await harness.settled()

    assert harness.total("requests_received_total") == sent
    assert sent == harness.total("requests_total") + harness.total("request_rejections_total")
    aborted = sum(
        harness.value("requests_total", endpoint=endpoint, finish_reason="abort")
        for endpoint in ("completions", "chat", "responses", "messages")
    )
    assert harness.total("request_aborts_total") == aborted > 0
    for cause in ("disconnect", "deadline", "queue_timeout"):
        assert harness.value("request_aborts_total", cause=cause) > 0, cause
    assert harness.total("request_rejections_total") > 0
    assert harness.engine.status.waiting_tokens == harness.value("requests_waiting_tokens") == 0
    assert not service._open
