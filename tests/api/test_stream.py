"""Server-sent events on the wire: form, signs of life, and errors after the 200."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.generation import GenerationFailed, GrammarFailed, Phase
from tests.api.conftest import PATH, Serve, Served, parse_events
from tests.api.fake_engine import FakeEngine


async def test_events_are_ascii_lines_of_json(served: Served) -> None:
    text = 'a\u2028b\x85c\r\nd\x0b"\\é🦜'
    served.engine.tokens = lambda request: list(text.encode())
    response = await served.post(prompt="x", max_tokens=60, stream=True)
    raw = response.content
    assert raw.isascii()
    assert b"\r" not in raw
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    assert raw.count(b"[DONE]") == 1
    events = parse_events(response.text)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


async def test_headers_come_before_the_first_token(served: Served) -> None:
    served.engine.gate.clear()
    async with served.client.stream("POST", PATH, json={"prompt": "x", "stream": True}) as response:
        assert response.status_code == 200
        served.engine.release()
        assert (await response.aread()).endswith(b"data: [DONE]\n\n")


async def test_comments_keep_a_silent_stream_alive(serve: Serve) -> None:
    async with serve(sse_keep_alive=0.03) as served:
        served.engine.gate.clear()
        body = {"prompt": "x", "stream": True, "max_tokens": 2, "n": 2}
        async with served.client.stream("POST", PATH, json=body) as response:
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(6)] == [": keep-alive", ""] * 3
            served.engine.release()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        assert len([line for line in rest if line.startswith("data: {")]) == 4


async def test_the_engine_dies_in_the_midst(served: Served) -> None:
    """Streams end with an error event and no [DONE]; other answers are a 500; then all is refused."""
    engine = served.engine
    engine.gate.clear()
    streams = [asyncio.create_task(served.post(prompt="x", stream=True, n=n)) for n in (1, 3)]
    whole = [asyncio.create_task(served.post(prompt="x", n=n)) for n in (1, 3)]
    await engine.until(lambda: len(engine.open) == 8)
    engine.fail('CUDA error: it\'s "broken"')
    for response in [await task for task in streams]:
        assert response.status_code == 200
        (event,) = parse_events(response.text)
        assert event["error"]["code"] == "generation_failed"
        assert event["error"].keys() == {"message", "type", "param", "code"}
    for response in [await task for task in whole]:
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "generation_failed"
    assert not engine.open
    for path in ("/health", "/ready"):
        response = await served.client.get(path)
        assert (response.status_code, response.json()["phase"]) == (503, "dead")
        assert "broken" in response.json()["detail"]
    response = await served.post(prompt="x")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
    assert served.metric("http_requests_total", method="POST", route=PATH, status="200", outcome="error") == 2
    assert served.metric("http_requests_total", method="POST", route=PATH, status="500", outcome="error") == 2


async def test_one_failed_choice_ends_its_siblings(served: Served) -> None:
    engine = served.engine
    engine.gate.clear()
    answer = asyncio.create_task(served.post(prompt="x", n=3, stream=True))
    await engine.until(lambda: len(engine.open) == 3)
    engine.streams[1].failure = GenerationFailed("NaN")
    engine.wake()
    (event,) = parse_events((await answer).text)
    assert event["error"]["code"] == "generation_failed"
    assert [stream.closed_by for stream in engine.streams] == ["sibling", None, "sibling"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_grammar_that_breaks_is_the_matter_of_who_sent_it(served: Served, stream: bool) -> None:
    """A 500 would be sent again by OpenAI's clients, and wake somebody at night."""
    engine = served.engine
    engine.gate.clear()
    answer = asyncio.create_task(served.post(prompt="x", stream=stream))
    await engine.until(lambda: len(engine.open) == 1)
    engine.streams[0].failure = GrammarFailed("it is too complex")
    engine.wake()
    response = await answer
    assert response.status_code == (200 if stream else 400)
    (body,) = parse_events(response.text) if stream else [response.json()]
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "grammar_failed")
    assert "it is too complex" in body["error"]["message"]


async def test_a_fault_of_our_own_in_a_stream(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The client is told nothing of it, the log everything."""

    def broken(token_id: int) -> bytes:
        raise ZeroDivisionError("secret")

    served.engine.bytes.token_bytes = broken
    response = await served.post(prompt="x", stream=True, logprobs=2)
    (event,) = parse_events(response.text)
    assert event["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "ZeroDivisionError: secret" in caplog.text
    assert not served.engine.open
    response = await served.post(prompt="x", logprobs=2)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["x-request-id"]
    assert not served.engine.open


async def test_a_drain_that_ran_out_of_time(serve: Serve) -> None:
    async with serve(FakeEngine()) as served:
        engine = served.engine
        engine.gate.clear()
        tasks = [asyncio.create_task(served.post(prompt="x", stream=stream)) for stream in (True, False)]
        await engine.until(lambda: len(engine.open) == 2)
        assert not await engine.drain(0.01)
        streamed, whole = [await task for task in tasks]
        (event,) = parse_events(streamed.text)
        assert event["error"]["code"] == whole.json()["error"]["code"] == "shutdown"
        assert whole.status_code == 503
        assert engine.phase is Phase.DRAINING


async def test_tops_that_read_the_same_stay_apart(served: Served) -> None:
    """The drawn token keeps its name; bytes that are no character are spelled."""
    served.engine.tokens = lambda request: [0x7F, 0xF0, 0x9F, 0xA6, 0x9C]
    answer = await served.complete(prompt="x", logprobs=3, max_tokens=5)
    logprobs: dict[str, Any] = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["\x7f", "", "", "", "🦜"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [
        ["\x7f", "bytes:\\x80", "bytes:\\x81"],
        ["", "bytes:\\xf1", "bytes:\\xf2"],
        ["", "bytes:\\xa0", "bytes:\\xa1"],
        ["", "bytes:\\xa7", "bytes:\\xa8"],
        ["🦜", "bytes:\\x9d", "bytes:\\x9e"],
    ]
    json.dumps(logprobs, allow_nan=False)


async def test_no_comments_where_none_are_wanted(serve: Serve) -> None:
    async with serve(sse_keep_alive=0) as served:
        served.engine.gate.clear()
        answer = asyncio.create_task(served.post(prompt="x", stream=True))
        await asyncio.sleep(0.1)
        served.engine.release()
        assert b"keep-alive" not in (await answer).content
