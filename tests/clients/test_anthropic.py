"""Anthropic's own Python package on /v1/messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.clients.conftest import QUESTION, WEATHER, Served, check_weather

TOOL: Any = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Anthropic]:
    with Anthropic(base_url=served.url, api_key=served.key, max_retries=0, timeout=120) as client:
        yield client


def asked(served: Served, **fields: Any) -> Any:
    return {"model": served.model, "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}, **fields}


def test_a_message_is_the_same_streamed_async_and_whole(client: Anthropic, served: Served) -> None:
    whole = client.messages.create(**asked(served))
    [block] = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**asked(served)) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens

    async def ask() -> str:
        client = AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0)
        async with client, client.messages.stream(**asked(served)) as stream:
            return await stream.get_final_text()

    assert asyncio.run(ask()) == block.text


def test_system_and_stop_sequences(client: Anthropic, served: Served) -> None:
    answer = client.messages.create(**asked(served, system="You answer in one word.", stop_sequences=["Par"]))
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "Par"
    assert "Par" not in "".join(block.text for block in answer.content if block.type == "text")


def test_tokens_are_counted_as_they_are_used(client: Anthropic, served: Served) -> None:
    system = [{"type": "text", "text": "You answer in one word."}]
    counted = client.messages.count_tokens(model=served.model, messages=QUESTION, system=system, tools=[TOOL])
    used = client.messages.create(**asked(served, system=system, tools=[TOOL], max_tokens=1)).usage
    cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert counted.input_tokens == used.input_tokens + cached


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_is_used_and_its_result_answered(client: Anthropic, served: Served, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    fields = asked(served, max_tokens=120, tools=[TOOL], tool_choice=choice)
    whole = client.messages.create(**fields)
    assert whole.stop_reason == "tool_use"
    [call] = [block for block in whole.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    check_weather(call.input)
    with client.messages.stream(**fields) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert (streamed.name, streamed.input) == (call.name, call.input)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    history = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**asked(served, messages=history, tools=[TOOL], tool_choice={"type": "none"}))
    assert [block.type for block in answer.content] == ["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes_and_words(client: Anthropic, served: Served, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**asked(served, extra_body={"temperature": 3}, stream=stream))
    assert "temperature" in str(bad.value)
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(served, model="claude", stream=stream))
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="sk-wrong").messages.create(**asked(served, stream=stream))
