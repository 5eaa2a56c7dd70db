"""Token ids of texts and conversations, and back, without a generation."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.parameters import IGNORED_HEADER
from tests.api.conftest import Serve, Served
from tests.api.fake_engine import BOS, EOS, ByteTokenizer, FakeEngine
from tests.api.test_validation import check_error


async def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


async def test_a_text(serve: Serve) -> None:
    engine = FakeEngine()
    engine.bytes = ByteTokenizer(adds_bos=True)
    async with serve(engine) as served:
        assert await post(served, "/tokenize", prompt="é!") == {
            "count": 4, "max_model_len": 64, "tokens": [BOS, 0xC3, 0xA9, 33], "token_strs": None,
        }  # fmt: skip
        bare = await post(
            served, "/tokenize", model="tiny", prompt="hi", add_special_tokens=False, return_token_strs=True
        )
        assert (bare["tokens"], bare["token_strs"]) == ([104, 105], ["h", "i"])
        assert (await post(served, "/tokenize", prompt="", add_special_tokens=False))["tokens"] == []
        assert await post(served, "/v1/tokenize", prompt="é!") == await post(served, "/tokenize", prompt="é!")
        long = await post(served, "/tokenize", prompt="x" * 200_000)
        assert long["count"] == 200_001  # more than the model takes, which is for the client to see
    assert not engine.streams


async def test_a_conversation(served: Served) -> None:
    """As the chat route would send it to the model."""
    messages = [{"role": "user", "content": "hi"}]
    answer = await post(served, "/tokenize", messages=messages)
    assert bytes(answer["tokens"]) == b"u:hi|a:"
    assert answer["count"] == 7
    answer = await post(served, "/tokenize", messages=messages, add_generation_prompt=False)
    assert bytes(answer["tokens"]) == b"u:hi|"
    response = await served.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert response.json()["usage"]["prompt_tokens"] == 7


async def test_back_to_text(served: Served) -> None:
    assert await post(served, "/detokenize", tokens=[BOS, 104, 105, EOS]) == {"prompt": "<s>hi</s>"}
    assert await post(served, "/detokenize", tokens=[BOS, 104], skip_special_tokens=True) == {"prompt": "h"}
    assert await post(served, "/v1/detokenize", tokens=[]) == {"prompt": ""}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
async def test_there_and_back(served: Served, text: str) -> None:
    tokens = (await post(served, "/tokenize", prompt=text, add_special_tokens=False))["tokens"]
    assert (await post(served, "/detokenize", tokens=tokens))["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "return_token_strs": "yes"},
            "return_token_strs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
async def test_refusals(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    content = json.dumps(body).encode()  # httpx would not write half a surrogate pair
    response = await served.client.post(path, content=content, headers={"content-type": "application/json"})
    assert check_error(response)["param"] == param


async def test_other_refusals(served: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        check_error(await served.client.post(path, json={**body, "model": "other"}), 404)
        response = await served.client.post(path, json={**body, "hue": 1})
        assert response.headers[IGNORED_HEADER] == "hue"
        check_error(await served.client.post(path, content=b"{", headers={"content-type": "application/json"}))
        check_error(await served.client.get(path), 405)


async def test_the_loop_is_free_meanwhile(served: Served) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            begun.set()
            assert go_on.wait(20)
            return super().encode(text, add_special_tokens)

    served.engine.bytes = Slow()
    answer = asyncio.create_task(post(served, "/tokenize", prompt="x"))
    await asyncio.to_thread(begun.wait, 20)
    assert (await served.client.get("/health")).status_code == 200
    go_on.set()
    assert (await answer)["count"] == 1


async def test_what_is_worked_on_is_bounded_and_ends_with_its_client(serve: Serve) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    encoded: list[str] = []

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            begun.release()
            assert go_on.wait(20)
            encoded.append(text)
            return super().encode(text, add_special_tokens)

    engine = FakeEngine(max_open=5)
    engine.bytes = Slow()
    async with serve(engine) as served:
        service = served.app.state.service
        bodies = [asyncio.create_task(served.client.post("/tokenize", json={"prompt": f"p{i}"})) for i in range(5)]
        async with asyncio.timeout(10):
            while service.preparing < 5:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(lambda: [begun.acquire() for _ in range(2)])  # the workers there are
        response = await served.client.post("/tokenize", json={"prompt": "one too many"})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        for body in bodies:
            body.cancel()
        async with asyncio.timeout(10):
            while service.preparing:
                await asyncio.sleep(0.01)
        go_on.set()
        assert (await post(served, "/tokenize", prompt="next"))["count"] == 4
    assert len(encoded) == 3, "those that nobody waits for are not begun"
