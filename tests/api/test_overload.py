"""What clients of a busy, slow or hanging server are told, and what an abort by id is to them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from server.generation import Phase
from tests.api.conftest import PATH, Serve, Served, parse_events
from tests.api.fake_engine import FakeEngine


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert isinstance(error, dict)
    return error


async def test_bodies_that_are_still_tokenized_hold_their_place_in_the_queue(serve: Serve) -> None:
    """The next one is told at once, not after its own text has been tokenized in vain."""
    async with serve(FakeEngine(max_open=4)) as served:
        engine, may_go = served.engine, threading.Event()
        encode, tokenized = engine.bytes.encode, []

        def slow(text: str, add_special_tokens: bool = True) -> list[int]:
            assert may_go.wait(20)
            tokenized.append(text)
            return encode(text, add_special_tokens)

        engine.bytes.encode = slow
        engine.gate.clear()
        held = [asyncio.create_task(served.post(prompt=f"p{i}", max_tokens=1)) for i in range(4)]
        async with asyncio.timeout(10):
            while served.app.state.service.preparing < 4:
                await asyncio.sleep(0.01)
        response = await served.post(prompt="one too many")
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert error_of(response)["code"] == "queue_full"
        assert served.metric("request_rejections_total", reason="queue_full") == 1
        assert (await served.client.get("/health")).status_code == 200
        may_go.set()
        await engine.until(lambda: len(engine.open) == 4)
        assert served.app.state.service.preparing == 0
        assert (await served.post(prompt="still")).status_code == 429
        engine.release()
        assert [response.status_code for response in await asyncio.gather(*held)] == [200] * 4
        assert sorted(tokenized) == ["p0", "p1", "p2", "p3"]
        assert (await served.post(prompt="now")).status_code == 200


async def test_a_refused_body_gives_its_place_back(serve: Serve) -> None:
    async with serve(FakeEngine(max_open=4)) as served:
        for _ in range(10):
            assert (await served.post(prompt="x", temperature=9)).status_code == 400
            assert (await served.post(prompt="x" * 100)).status_code == 400
        assert served.app.state.service.preparing == 0
        assert (await served.post(prompt="x")).status_code == 200


async def test_too_many_tokens_in_the_queue(served: Served) -> None:
    served.engine.max_queued_tokens, served.engine.waiting_tokens = 100, 95
    response = await served.post(prompt="x" * 6)
    assert (response.status_code, error_of(response)["code"]) == (429, "queue_tokens")
    assert int(response.headers["retry-after"]) > 0
    assert served.metric("request_rejections_total", reason="queue_tokens") == 1
    response = await served.post(prompt=["x" * 40] * 3)
    assert (response.status_code, error_of(response)["code"]) == (400, "too_many_prompt_tokens")


async def test_not_started_in_time(served: Served) -> None:
    served.engine.gate.clear()
    response = await served.post(prompt="x", queue_timeout=0.05)
    assert (response.status_code, error_of(response)["code"]) == (503, "queue_timeout")
    assert response.headers["retry-after"] == "7"
    (event,) = await served.events(prompt="x", queue_timeout=0.05)
    assert event["error"]["code"] == "queue_timeout"


async def test_no_token_in_time(served: Served) -> None:
    """A client that tries again on a 5xx is told not to: it would be no faster."""
    served.engine.gate.clear()
    response = await served.post(prompt="x", request_timeout=0.05)
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert (error_of(response)["code"], error_of(response)["type"]) == ("deadline_exceeded", "timeout_error")
    (event,) = await served.events(prompt="x", request_timeout=0.05)
    assert event["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_time_up_in_the_midst_of_an_answer(served: Served, stream: bool) -> None:
    engine = served.engine
    posted = asyncio.create_task(
        served.post(prompt="x", max_tokens=20, temperature=0, request_timeout=0.2, stream=stream)
    )
    engine.step_seconds = 0.01
    await engine.until(lambda: bool(engine.open))
    async with asyncio.timeout(5):
        while engine.streams[0].sent < 3:
            await asyncio.sleep(0.005)
    engine.gate.clear()
    response = await posted
    assert response.status_code == 200
    bodies = parse_events(response.text)[:-1] if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", "deadline")
    text = "".join(choice["text"] for choice in choices)
    assert 3 <= len(text) < 20
    assert "abcdefghijklmnopqrst".startswith(text)


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
async def test_aborted_by_id(served: Served, body: dict[str, Any]) -> None:
    engine, service = served.engine, served.app.state.service
    n = body.get("n", 1)
    engine.gate.clear()
    headers = {"x-request-id": "mine"}
    request = served.client.post(PATH, json={"prompt": "x", "max_tokens": 5, **body}, headers=headers)
    posted = asyncio.create_task(request)
    await engine.until(lambda: len(engine.open) == n)
    assert service.abort("another", "") is None
    ended = service.abort("mine", "")
    assert len(ended) == n
    assert all(sequence.startswith("mine/") for sequence in ended)
    response = await posted
    if body.get("stream"):
        (event,) = parse_events(response.text)
        error = event["error"]
        assert response.status_code == 200
    else:
        error = error_of(response)
        assert (response.status_code, response.headers["x-should-retry"]) == (410, "false")
    assert error["code"] == "aborted"
    assert [stream.closed_by for stream in engine.streams] == ["api"] * n
    assert service.abort("mine", "") is None


async def test_a_hanging_step_is_unhealthy_until_it_ends(served: Served) -> None:
    for seconds, status, said in ((0.0, 200, "ok"), (61.0, 503, "stalled"), (0.0, 200, "ok")):
        served.engine.stalled_seconds = seconds
        for path in ("/health", "/ready"):
            response = await served.client.get(path)
            body = response.json()
            assert (response.status_code, body["status"], body["phase"]) == (status, said, "ready")
            assert ("61 seconds (--stall-timeout)" in body["detail"]) == (status == 503)
    served.engine.phase, served.engine.stalled_seconds = Phase.DRAINING, 61.0
    assert (await served.client.get("/health")).status_code == 503
