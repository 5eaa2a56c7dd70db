"""The engine as its callers see it, on a tiny random model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from server.generation import EngineUnavailable, GenerationFailed, Phase, QueueFull, RequestTooLong
from server.reports import CacheSnapshot
from server.scheduler.request import Status
from server.step import NonFiniteLogits, SamplingParams, StepPlan, StepResult
from tests.engine_harness import Harness, collect, text_of
from tests.tiny_checkpoint import save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def harness(checkpoint: Path) -> AsyncIterator[Harness]:
    harness = Harness(checkpoint)
    await harness.ready()
    yield harness
    await harness.engine.drain(0.0)
    await harness.engine.stop()


async def test_a_request_runs_to_its_length(harness: Harness) -> None:
    outputs = await collect(harness.submit(harness.request(max_tokens=8)))
    letter = text_of(outputs)[0]
    assert text_of(outputs) == letter * 8
    assert [token.token_id for output in outputs for token in output.tokens] == [65] * 8
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].usage.completion_tokens == 8
    assert all(output.finish_reason is None for output in outputs[:-1])


async def test_many_requests_share_the_batch_and_get_their_own_tokens(harness: Harness) -> None:
    def forced(token_id: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, logit_bias={token_id: 100.0})

    requests = [harness.request((7,) * (1 + i), max_tokens=5 + i, params=forced(40 + i)) for i in range(12)]
    streams = [harness.submit(request) for request in requests]
    for i, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
        assert [token.token_id for output in outputs for token in output.tokens] == [40 + i] * (5 + i)
    await harness.settled()
    assert harness.value("requests_total", endpoint="completions", finish_reason="length") == 12
    assert harness.value("generation_tokens_total") == sum(5 + i for i in range(12))
    assert harness.value("prompt_tokens_total") == sum(1 + i for i in range(12))
    assert harness.value("time_to_first_token_seconds_count") == 12
    assert harness.value("inter_token_latency_seconds_count") == sum(4 + i for i in range(12))


async def test_a_stop_string_ends_the_text_before_it(harness: Harness) -> None:
    letter = text_of(await collect(harness.submit(harness.request(max_tokens=1))))
    outputs = await collect(harness.submit(harness.request(max_tokens=20, stop=(letter * 3,))))
    assert text_of(outputs) == ""
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", letter * 3)
    assert outputs[-1].usage.completion_tokens == 3
    assert sum(len(output.tokens) for output in outputs) == 3


@pytest.mark.parametrize(("min_tokens", "max_tokens", "expected"), [(0, 20, 3), (0, 3, 3), (5, 20, 5)])
async def test_a_text_ends_with_the_token_that_completes_it(
    harness: Harness, min_tokens: int, max_tokens: int, expected: int
) -> None:
    class Three:
        text = ""

        def feed(self, text: str) -> bool:
            self.text += text
            return len(self.text) >= 3

    params = SamplingParams(temperature=0.0, logit_bias={65: 100.0}, min_tokens=min_tokens)
    finished = harness.value("requests_total", endpoint="completions", finish_reason="stop")
    outputs = await collect(
        harness.submit(harness.request(params=params, max_tokens=max_tokens, ending=Three(), stop=("never",)))
    )
    assert len(text_of(outputs)) == expected
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
    assert outputs[-1].usage.completion_tokens == expected
    await harness.settled()
    assert harness.value("requests_total", endpoint="completions", finish_reason="stop") == finished + 1


async def test_a_stop_token_is_counted_but_not_shown(harness: Harness) -> None:
    params = SamplingParams(temperature=0.0, logit_bias={65: 100.0}, stop_token_ids=frozenset({65}), min_tokens=0)
    outputs = await collect(harness.submit(harness.request(params=params)))
    assert text_of(outputs) == ""
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", 65)
    assert outputs[-1].usage.completion_tokens == 1
    shown = await collect(harness.submit(harness.request(params=params, include_stop_str=True)))
    assert len(text_of(shown)) == 1


async def test_the_prompt_is_scored_and_nothing_generated(harness: Harness) -> None:
    prompt = tuple(range(1, 101))
    outputs = await collect(harness.submit(harness.request(prompt, max_tokens=0, prompt_logprobs=2)))
    (output,) = outputs
    assert output.finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    assert [score.token_id for score in output.prompt_logprobs[1:] if score] == list(prompt[1:])
    assert all(len(score.top) == 2 for score in output.prompt_logprobs[1:] if score)
    assert output.usage.completion_tokens == 0


async def test_the_second_of_two_equal_prompts_is_cached(harness: Harness) -> None:
    prompt = tuple(range(1, 51))
    first = await collect(harness.submit(harness.request(prompt)))
    second = await collect(harness.submit(harness.request(prompt)))
    other = await collect(harness.submit(harness.request(prompt, cache_salt="other tenant")))
    assert (first[-1].usage.cached_tokens, second[-1].usage.cached_tokens) == (0, 48)
    assert other[-1].usage.cached_tokens == 0
    assert text_of(first) == text_of(second) == text_of(other)


async def test_siblings_compute_their_prompt_once(harness: Harness) -> None:
    prompt = tuple(range(1, 51))
    leader = harness.request(prompt)
    streams = [harness.submit(leader)]
    streams += [harness.submit(harness.request(prompt, leader=leader.request_id)) for _ in range(3)]
    answers = await asyncio.gather(*map(collect, streams))
    assert [answer[-1].usage.cached_tokens for answer in answers] == [0, 48, 48, 48]
    await harness.settled()
    assert harness.value("prompt_tokens_total") == 50


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
async def test_closing_frees_the_blocks_within_two_steps_in_any_state(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    started = harness.engine._started
    assert started is not None
    run, in_step, go_on = started.runner.run, threading.Event(), threading.Event()
    plans: list[StepPlan] = []

    def step_by_step(plan: StepPlan) -> StepResult:
        plans.append(plan)
        in_step.set()
        assert go_on.wait(10)
        go_on.clear()
        return run(plan)

    async def next_step() -> None:
        go_on.set()
        await asyncio.to_thread(in_step.wait, 10)
        in_step.clear()

    monkeypatch.setattr(started.runner, "run", step_by_step)
    blockers = [harness.submit(harness.request(max_tokens=400)) for _ in range(4 if state == "queued" else 1)]
    await asyncio.to_thread(in_step.wait, 10)
    in_step.clear()
    stream = harness.submit(harness.request((5,) * 200, max_tokens=100))  # four steps of at most 64 tokens
    while True:
        await next_step()
        prefills = plans[-1].num_sequences - plans[-1].num_decodes
        if {"queued": True, "prefilling": prefills == 1, "decoding": plans[-1].num_decodes == 2}[state]:
            break
    scheduler = started.scheduler
    (sequence,) = (request for request in scheduler.running + scheduler.waiting if request.num_prompt == 200)
    assert (sequence in scheduler.waiting) == (state == "queued")
    assert sequence.is_prefilling == (state != "decoding")
    held = scheduler.pool.num_used

    stream.close()
    for _ in range(2):
        await next_step()
    assert sequence.status is Status.FINISHED
    assert sequence.num_blocks == 0
    assert scheduler.pool.num_used <= held - (0 if state == "queued" else 13) + 1

    monkeypatch.setattr(started.runner, "run", run)
    go_on.set()
    for blocker in blockers:
        blocker.close()
    await harness.settled()
    aborted = 1 + len(blockers)
    assert harness.value("requests_total", endpoint="completions", finish_reason="abort") == aborted
    assert harness.value("request_aborts_total", cause="disconnect") == aborted
    assert await harness.engine.drain(5.0)


async def test_what_cannot_run_is_refused_at_once(checkpoint: Path) -> None:
    harness = Harness(checkpoint, max_num_seqs=1, max_num_batched_tokens=32, max_queued_requests=2, kv_blocks=8)
    with pytest.raises(EngineUnavailable) as early:
        harness.submit(harness.request())
    assert early.value.phase is Phase.LOADING
    await harness.ready()
    assert harness.engine.model is not None
    assert harness.engine.model.max_model_len == 128
    with pytest.raises(RequestTooLong, match="--kv-blocks"):
        harness.submit(harness.request((1,) * 100, max_tokens=29))
    request = harness.request((1,) * 28, max_tokens=100)
    streams = [harness.submit(request)]
    with pytest.raises(ValueError, match="in use"):
        harness.submit(request)
    streams += [harness.submit(harness.request((1,) * 28, max_tokens=100)) for _ in range(2)]
    with pytest.raises(QueueFull) as full:
        harness.submit(harness.request())
    assert full.value.retry_after >= 1
    answers = await asyncio.gather(*map(collect, streams))
    assert [answer[-1].usage.completion_tokens for answer in answers] == [100] * 3
    await harness.engine.drain(0.0)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        harness.submit(harness.request())
    await harness.engine.stop()


async def test_draining_finishes_what_is_open_and_no_more(harness: Harness) -> None:
    stream = harness.submit(harness.request(max_tokens=200))
    task = asyncio.create_task(collect(stream))
    assert await harness.engine.drain(30.0)
    assert (await task)[-1].usage.completion_tokens == 200


async def test_draining_aborts_what_takes_too_long(harness: Harness) -> None:
    stream = harness.submit(harness.request(max_tokens=500))
    await anext(stream)
    assert not await harness.engine.drain(0.0)
    rest = await collect(stream)
    assert rest[-1].finish_reason == "abort"
    assert harness.value("request_aborts_total", cause="shutdown") == 1


async def test_a_request_with_broken_numbers_fails_alone(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    started = harness.engine._started
    assert started is not None
    run = started.runner.run

    def broken(plan: StepPlan) -> StepResult:
        bad = [
            row for row in range(plan.num_sequences) if 99 in plan.input_ids[slice(*plan.query_starts[row : row + 2])]
        ]
        if bad:
            raise NonFiniteLogits(tuple(bad))
        return run(plan)

    monkeypatch.setattr(started.runner, "run", broken)
    good = [harness.submit(harness.request((i,) * 5, max_tokens=30)) for i in range(3)]
    bad = harness.submit(harness.request((1, 99, 1)))
    with pytest.raises(GenerationFailed, match="NaN"):
        await collect(bad)
    for outputs in await asyncio.gather(*map(collect, good)):
        assert [token.token_id for output in outputs for token in output.tokens] == [65] * 30
    await harness.settled()
    assert harness.value("requests_total", endpoint="completions", finish_reason="error") == 1
    assert harness.engine.status.phase is Phase.READY


async def test_a_failing_step_fails_every_open_request_and_says_why(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [harness.submit(harness.request(max_tokens=400)) for _ in range(6)]
    await anext(streams[0])
    started = harness.engine._started
    assert started is not None

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(started.runner, "run", fail)
    for stream in streams:
        with pytest.raises(GenerationFailed, match="the device is gone"):
            await collect(stream)
    status = harness.engine.status
    assert status.phase is Phase.DEAD
    assert "the device is gone" in status.detail
    with pytest.raises(EngineUnavailable, match="the device is gone"):
        harness.submit(harness.request())
    assert harness.value("requests_total", endpoint="completions", finish_reason="error") == 6
    assert harness.value("requests_running") == 0
    assert harness.value("engine_state", state="dead") == 1


async def test_the_cache_can_be_looked_at_between_steps_and_during_one(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = await asyncio.wait_for(harness.engine.cache_snapshot(), 10)
    assert (idle.used_blocks, idle.capacity_blocks, idle.sequences) == (0, 64, ())
    started = harness.engine._started
    assert started is not None
    run, in_step, go_on = started.runner.run, threading.Event(), threading.Event()

    def held(plan: StepPlan) -> StepResult:
        in_step.set()
        assert go_on.wait(10)
        return run(plan)

    monkeypatch.setattr(started.runner, "run", held)
    stream = harness.submit(harness.request((5,) * 40, max_tokens=400))
    await asyncio.to_thread(in_step.wait, 10)
    (sequence,) = (await asyncio.wait_for(harness.engine.cache_snapshot(), 10)).sequences
    assert (sequence.request_id, sequence.status, sequence.num_tokens) == (stream.request_id, "running", 40)
    assert sequence.num_computed == 0  # the step has not ended
    assert sum(last - first + 1 for first, last in sequence.blocks[0]) == 3
    waiting = asyncio.create_task(harness.engine.cache_snapshot())
    await asyncio.sleep(0)  # it has asked
    waiting.cancel()  # which is no trouble to the engine
    go_on.set()
    await anext(stream)
    (sequence,) = (await asyncio.wait_for(harness.engine.cache_snapshot(), 10)).sequences
    assert sequence.num_computed >= 40
    stream.close()
    await harness.settled()


async def test_the_cache_of_an_engine_that_does_not_run_cannot_be_looked_at(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(checkpoint)
    with pytest.raises(EngineUnavailable, match="starting"):
        await harness.engine.cache_snapshot()
    await harness.ready()
    started = harness.engine._started
    assert started is not None
    loop, die = asyncio.get_running_loop(), harness.engine._die
    late: list[Future[CacheSnapshot]] = []

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("the device is gone")

    def asked_at_the_last_moment(detail: str) -> None:
        late.append(asyncio.run_coroutine_threadsafe(harness.engine.cache_snapshot(), loop))
        while not harness.engine._inbox:
            time.sleep(0.001)
        die(detail)

    monkeypatch.setattr(started.runner, "run", fail)
    monkeypatch.setattr(harness.engine, "_die", asked_at_the_last_moment)
    with pytest.raises(GenerationFailed):
        await collect(harness.submit(harness.request()))
    for asked in (asyncio.wrap_future(late[0]), harness.engine.cache_snapshot()):
        with pytest.raises(EngineUnavailable, match="the device is gone"):
            await asyncio.wait_for(asked, 10)
    await harness.engine.stop()


async def test_a_look_at_the_cache_does_not_outlive_the_engine(checkpoint: Path) -> None:
    harness = Harness(checkpoint)
    await harness.ready()
    asked = asyncio.create_task(harness.engine.cache_snapshot())
    await asyncio.sleep(0)
    await harness.engine.stop()
    assert (await asyncio.wait_for(asked, 10)).used_blocks == 0
    with pytest.raises(EngineUnavailable):
        await harness.engine.cache_snapshot()


async def test_whoever_looks_at_a_broken_cache_hears_of_it_and_nobody_else(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = harness.engine._started
    assert started is not None
    monkeypatch.setattr(started.scheduler, "snapshot", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(harness.engine.cache_snapshot(), 10)
    assert text_of(await collect(harness.submit(harness.request(max_tokens=3))))


async def test_an_answer_says_how_many_tokens_its_budget_has_evicted(checkpoint: Path) -> None:
    harness = Harness(checkpoint, kv_policy="h2o", block_size=4)
    await harness.ready()
    for budget, max_tokens in ((16, 60), (16, 3), (None, 60)):
        held = evicted = 0
        for _ in range(29 + max_tokens):  # the last token is not computed
            if budget is not None and held == budget + 16:
                held, evicted = budget, evicted + 16
            held += 1
        for policy in ("h2o", "window"):
            request = harness.request((7,) * 30, max_tokens=max_tokens, kv_budget=budget, kv_policy=policy)
            outputs = await collect(harness.submit(request))
            assert outputs[-1].usage.evicted_tokens == evicted
            assert (evicted > 0) == (budget is not None and max_tokens == 60)
    await harness.engine.drain(0.0)
    await harness.engine.stop()
