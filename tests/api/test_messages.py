"""POST /v1/messages: Anthropic's client, streams against whole answers, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ToolParam
from pydantic import BaseModel

from server.api.messages.blocks import parse_input
from server.api.messages.translate import to_chat
from server.api.messages.wire import MessagesRequest
from server.api.wire import parse
from server.generation import Phase
from tests.api.conftest import Serve, Served
from tests.api.talking import REASONED, TalkingEngine, call, named_events

PATH = "/v1/messages"
WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = f"{REASONED}Yes.{call('weather', city='é')}"
CALLS = f"{REASONED}Let me see.\n{call('weather', city='Łódź', days=[1, 2])}\n{call('weather', city='Oslo')}"
HI: Any = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def talk(serve: Serve) -> AsyncIterator[tuple[Served, TalkingEngine]]:
    engine = TalkingEngine("Hello, é!")
    async with serve(engine) as served:
        yield served, engine


Talk = tuple[Served, TalkingEngine]


def client_of(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)


def check_error(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    error = body["error"]
    assert error["type"] == kind
    assert error["message"]
    assert isinstance(error, dict)
    return error


async def test_a_text(talk: Talk) -> None:
    served, engine = talk
    engine.cached_tokens = 5
    answer = await client_of(served).messages.create(
        **HI,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        extra_body={"temperature": 0.5},
    )
    assert engine.prompt == "system:Be brief.|user:Hi|assistant:"
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello, é!"}]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    usage = answer.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (5, 0)
    assert usage.input_tokens == len(engine.prompt) - 5
    assert usage.output_tokens == len("Hello, é!".encode()) + 1
    assert answer.id == f"msg_{answer._request_id}"


async def test_a_stream(talk: Talk) -> None:
    served, engine = talk
    engine.reply = CALLS
    engine.cached_tokens = 3
    response = await served.client.post(PATH, json={**HI, "tools": [WEATHER], "stream": True})
    events = named_events(response.text)
    kinds = [event["type"] for event in events]
    shown = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert shown == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == len(CALLS.encode()) + 1
    assert 0 < events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] < len(CALLS)


async def test_the_stream_helper(talk: Talk) -> None:
    served, engine = talk
    engine.reply = CALLS
    client = client_of(served)
    async with client.messages.stream(**HI, tools=[WEATHER]) as stream:
        text = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text.strip() == "Let me see."
    whole = await client.messages.create(**HI, tools=[WEATHER])
    assert _plain(final.to_dict()) == _plain(whole.to_dict())
    assert [block.input for block in whole.content if block.type == "tool_use"] == [
        {"city": "Łódź", "days": [1, 2]},
        {"city": "Oslo"},
    ]
    thought = whole.content[0]
    assert thought.type == "thinking"
    assert thought.thinking == "Well, é."
    assert thought.signature


async def test_the_client_without_async(talk: Talk) -> None:
    served, _ = talk

    def work() -> list[str]:
        client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
        with client.messages.stream(**HI) as stream:
            final = stream.get_final_message()
        return [block.text for block in [*final.content, *client.messages.create(**HI).content] if block.type == "text"]

    assert await asyncio.to_thread(work) == ["Hello, é!"] * 2


async def test_a_tool_is_used(talk: Talk) -> None:
    """The answer goes back as it came, thinking and all."""
    served, engine = talk
    engine.reply = CALLS
    client = client_of(served)
    first = await client.messages.create(**HI, tools=[WEATHER])
    uses = [block for block in first.content if block.type == "tool_use"]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": uses[0].id, "content": "sun"},
        {
            "type": "tool_result",
            "tool_use_id": uses[1].id,
            "content": [{"type": "text", "text": "?"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    conversation: Any = [*HI["messages"], first.to_param(), {"role": "user", "content": results}]
    engine.reply = "Sun."
    second = await client.messages.create(**{**HI, "messages": conversation}, tools=[WEATHER])
    assert second.stop_reason == "end_turn"
    turn = engine.prompt.split("|")
    assert turn[1] == "user:Hi"
    assert turn[2].startswith("assistant:<think>Well, é.</think>Let me see.")
    assert turn[2].count("<tool_call>") == 2
    assert turn[3:] == ["tool:sun", "tool:Error: ?", "user:Well?", "assistant:"]


@pytest.mark.parametrize("reply", ["Hello, é!", CALL, ""])
async def test_a_cut_is_the_same_streamed_and_whole(talk: Talk, reply: str) -> None:
    served, engine = talk
    engine.reply = reply
    client = client_of(served)
    size = len(reply.encode()) + 1
    for limit in range(1, size + 1):
        fields = {**HI, "max_tokens": limit, "tools": [WEATHER]}
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            final = await stream.get_final_message()
        assert _plain(whole.to_dict()) == _plain(final.to_dict())
        ended = "tool_use" if reply == CALL else "end_turn"
        assert whole.stop_reason == (ended if limit == size else "max_tokens")
        assert whole.usage.output_tokens == limit


def _plain(value: Any) -> Any:
    """Without what differs from request to request, and what the client adds."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in ("id", "parsed_output")}
    return [_plain(item) for item in value] if isinstance(value, list) else value


async def test_the_end_of_the_context_is_told_apart(talk: Talk) -> None:
    served, engine = talk
    engine.reply = "x" * 5000
    assert (await client_of(served).messages.create(**{**HI, "max_tokens": 5000})).stop_reason == (
        "model_context_window_exceeded"
    )


class City(BaseModel):
    name: str
    people: int


async def test_structured_output_is_parsed(talk: Talk) -> None:
    served, engine = talk
    engine.reply = '{"name":"Oslo","people":700000}'
    client = client_of(served)
    answer = await client.messages.parse(**HI, output_format=City)
    assert answer.parsed_output == City(name="Oslo", people=700000)
    assert engine.requests[-1].constraint is not None
    schema = {"type": "string", "pattern": "(?=x)"}
    with pytest.raises(anthropic.BadRequestError, match=r"'output_config\.format\.schema'"):
        await client.messages.create(**HI, output_config={"format": {"type": "json_schema", "schema": schema}})


async def test_stop_sequences(talk: Talk) -> None:
    served, _ = talk
    answer = await client_of(served).messages.create(**HI, stop_sequences=["é", "x"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "é")
    assert answer.content[0].to_dict()["text"] == "Hello, "
    async with client_of(served).messages.stream(**HI, stop_sequences=["é"]) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "é")


async def test_the_last_turn_of_the_assistant_is_continued(talk: Talk) -> None:
    served, engine = talk
    messages: Any = [*HI["messages"], {"role": "assistant", "content": "Hell"}]
    await client_of(served).messages.create(**{**HI, "messages": messages})
    assert engine.prompt == "user:Hi|assistant:Hell"


async def test_an_empty_system_prompt_is_none(talk: Talk) -> None:
    served, engine = talk
    await client_of(served).messages.create(**HI, system="")
    assert engine.prompt == "user:Hi|assistant:"


async def test_thinking_that_the_template_knows_nothing_of_is_reported(serve: Serve) -> None:
    async with serve(chat_template="{% for message in messages %}{{ message.content }}{% endfor %}") as served:
        for thinking, ignored in (({"type": "adaptive"}, "thinking"), ({"type": "disabled"}, None)):
            raw = await client_of(served).messages.with_raw_response.create(**HI, thinking=thinking)
            assert raw.headers.get("x-sluice-ignored-parameters") == ignored


async def test_thinking(talk: Talk) -> None:
    served, engine = talk
    client = client_of(served)
    engine.reply = REASONED + "Yes."
    raw = await client.messages.with_raw_response.create(**HI, thinking={"type": "enabled", "budget_tokens": 1024})
    assert raw.headers["x-sluice-ignored-parameters"] == "thinking.budget_tokens"
    assert [block.type for block in (await raw.parse()).content] == ["thinking", "text"]
    hidden = await client.messages.create(**HI, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["text"]
    engine.reply = "Yes."
    await client.messages.create(**HI, thinking={"type": "disabled"})
    assert engine.prompt.endswith("assistant:<think>\n</think>")


async def test_count_tokens(talk: Talk) -> None:
    served, engine = talk
    client = client_of(served)
    fields = {key: value for key, value in HI.items() if key != "max_tokens"}
    count = await client.messages.count_tokens(**fields, system="Be brief.", tools=[WEATHER])
    whole = await client.messages.create(**HI, system="Be brief.", tools=[WEATHER])
    assert count.input_tokens == whole.usage.input_tokens
    assert len(engine.streams) == 1
    long: Any = [{"role": "user", "content": "x" * 9000}]
    assert (await client.messages.count_tokens(model="tiny", messages=long)).input_tokens > 9000
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="none", messages=long)


async def test_errors_have_their_classes(talk: Talk) -> None:
    served, engine = talk
    client = client_of(served)
    with pytest.raises(anthropic.BadRequestError) as bad:
        await client.messages.create(**HI, extra_body={"temperature": 2})
    assert isinstance(bad.value.body, dict)
    assert bad.value.body["error"]["param"] == "temperature"
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**HI, "model": "none"})
    engine.max_open = 0
    with pytest.raises(anthropic.RateLimitError):
        await client.messages.create(**HI)
    engine.phase = Phase.LOADING
    with pytest.raises(anthropic.InternalServerError):
        await client.messages.create(**HI)


async def test_a_failure_in_a_stream(talk: Talk) -> None:
    served, engine = talk
    engine.gate.clear()
    stream = await client_of(served).messages.create(**HI, stream=True)
    engine.fail("gone")
    with pytest.raises(anthropic.APIStatusError, match="gone") as failure:
        await anext(aiter(stream))
    assert isinstance(failure.value.body, dict)
    assert failure.value.body["error"]["type"] == "api_error"


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def turns(*contents: Any) -> dict[str, Any]:
    """The assistant speaks first."""
    roles = ("assistant", "user")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "--max-model-len"),
    (user(IMAGE), "messages[0].content[0]", "text model"),
    (user({"type": "document", "source": {}}), "messages[0].content[0]", "document"),
    (user({"type": "text"}), "messages[0].content[0].text", "required"),
    (user({"type": "text", "text": 7}), "messages[0].content[0].text", "string"),
    (user(RESULT), "messages[0].content[0].tool_use_id", "before it"),
    ({**turns([{**USE, "id": ""}], [RESULT]), "system": "x"}, "messages[0].content[0].id", "1 to 256"),
    (turns([USE], [{**RESULT, "content": [IMAGE]}]), "messages[1].content[0].content[0]", "text"),
    (turns([USE], [{**RESULT, "is_error": 1}]), "messages[1].content[0].is_error", "true"),
    (turns([USE]), "messages[0]", "results"),
    (turns([{**USE, "input": "x"}]), "messages[0].content[0].input", "object"),
    (turns([{"type": "redacted_thinking", "data": "x"}], "x"), "messages[0].content[0]", "read"),
    (turns([{"type": "server_tool_use"}], "x"), "messages[0].content[0]", "server_tool_use"),
    ({"system": [IMAGE]}, "system[0]", "text"),
    ({"system": 7}, "system", "string"),
    ({"max_tokens": None}, "max_tokens", "at least 1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"temperature": 1.5}, "temperature", "0 to 1"),
    ({"top_k": -1}, "top_k", "at least 1"),
    ({"min_tokens": 600}, "min_tokens", "500"),
    ({"stop_sequences": "x"}, "stop_sequences", "list"),
    ({"stop_sequences": [""]}, "stop_sequences[0]", "1 to"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", "16"),
    ({"stop": ["x"]}, "stop", "'stop_sequences'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "custom"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "letters"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading", "shown"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type", "any"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "tools"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [WEATHER]}, "tool_choice.name", "among"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "adaptive"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "at least 1"),
    ({"output_config": {"effort": "much"}}, "output_config.effort", "high"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "json_schema"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema", "required"),
    ({"container": "c"}, "container", "no tools"),
    ({"mcp_servers": [{}]}, "mcp_servers", "no tools"),
    ({"context_management": {"edits": [{"type": "x"}]}}, "context_management.edits[0]", "edited"),
    ({"speed": "fast"}, "speed", "standard"),
    ({"n": 2}, "n", "one answer"),
    ({"response_format": {"type": "json_object"}}, "response_format", "output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "hint"), REFUSED)
async def test_refusals(talk: Talk, fields: dict[str, Any], param: str, hint: str) -> None:
    served, engine = talk
    for stream in (True, False):
        body = json.dumps({**HI, **fields, "stream": stream})
        response = await served.client.post(PATH, content=body, headers={"content-type": "application/json"})
        error = check_error(response, 400, "invalid_request_error")
        assert error["param"] == param
        assert hint in error["message"]
    assert not engine.streams


async def test_fields_that_ask_for_nothing_pass(talk: Talk) -> None:
    served, engine = talk
    response = await served.client.post(
        PATH,
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-api-key": "k"},
        json={
            **HI, "metadata": {"user_id": "u"}, "service_tier": "auto", "container": None, "mcp_servers": [],
            "cache_control": {"type": "ephemeral"}, "speed": "standard", "tools": [], "tool_choice": {"type": "auto"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {}, "seed": 3, "min_p": 0.1, "temprature": 1,
        },
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert response.headers["x-sluice-ignored-parameters"] == "temprature"
    params = engine.requests[-1].params
    assert (params.seed, params.min_p) == (3, 0.1)


def test_turns() -> None:
    """Turns of one role in a row are one; tool results are messages of their own, where they stand."""

    def messages(*given: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
        listed = [{"role": role, "content": content} for role, content in given]
        raw = {"max_tokens": 9, "messages": listed, **fields}
        made = to_chat(parse(MessagesRequest, raw), raw)["messages"]
        assert isinstance(made, list)
        return made

    text = {"type": "text", "text": "b"}
    assert messages(("user", "a"), ("user", [text, text]), system="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\n\nbb"},
    ]
    thought = {"type": "thinking", "thinking": "t", "signature": ""}
    made_call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert messages(("assistant", [thought, text]), ("assistant", [USE]), ("user", [text, RESULT, text])) == [
        {"role": "assistant", "content": "b", "reasoning_content": "t", "tool_calls": [made_call]},
        {"role": "user", "content": "b"},
        {"role": "tool", "tool_call_id": "t", "content": ""},
        {"role": "user", "content": "b"},
    ]


def test_input_of_a_cut_call() -> None:
    assert parse_input("") == {}
    assert parse_input('{"a": [1, 2], "b": "x') == {"a": [1, 2]}
    assert parse_input("[1]") == {}
    assert parse_input("nonsense") == {}
