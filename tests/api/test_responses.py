"""POST /v1/responses: the official client, streams against whole answers, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import FunctionToolParam, Response
from pydantic import BaseModel

from server.api.chat.reply import ChatDelta
from server.api.responses.items import ResponseItems, Status
from server.api.responses.translate import to_chat
from server.api.responses.wire import ResponsesRequest
from server.api.wire import parse
from server.text.reply import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from tests.api.conftest import Serve, Served
from tests.api.talking import REASONED, TalkingEngine, call, named_events
from tests.api.test_validation import check_error

PATH = "/v1/responses"
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
CALL = f"{REASONED}Yes.{call('weather', city='é')}"
CALLS = f"{REASONED}Let me see.\n{call('weather', city='Łódź')}\n{call('weather', city='Oslo')}"


@pytest.fixture
async def talk(serve: Serve) -> AsyncIterator[tuple[Served, TalkingEngine]]:
    engine = TalkingEngine("Hello, é!")
    async with serve(engine) as served:
        yield served, engine


Talk = tuple[Served, TalkingEngine]


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=served.client)


async def test_a_text(talk: Talk) -> None:
    served, engine = talk
    client = client_of(served)
    answer = await client.responses.create(
        model="tiny", instructions="Be brief.", input="Hi", temperature=0.5, metadata={"a": "b"}
    )
    assert engine.prompt == "system:Be brief.|user:Hi|assistant:"
    assert answer.output_text == "Hello, é!"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.temperature, answer.metadata, answer.instructions) == (0.5, {"a": "b"}, "Be brief.")
    assert answer.completed_at is not None
    assert answer.model_dump()["store"] is False
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (len(engine.prompt), len("Hello, é!".encode()) + 1)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert answer.id == f"resp_{answer._request_id}"


async def test_a_stream(talk: Talk) -> None:
    served, engine = talk
    engine.reply = CALLS
    engine.cached_tokens = 3
    client = client_of(served)
    stream = await client.responses.create(model="tiny", input="Hi", tools=[WEATHER], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    shown = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    text = ["output_text.delta", "output_text.done", "content_part.done"]
    thought = ["reasoning_text.delta", "reasoning_text.done", "content_part.done"]
    function = ["function_call_arguments.delta", "function_call_arguments.done"]
    added, done, part = "output_item.added", "output_item.done", "content_part.added"
    assert shown == [
        "created", "in_progress", added, part, *thought, done, added, part, *text, done,
        added, *function, done, added, *function, done, "completed",
    ]  # fmt: skip
    last = events[-1]
    assert last.type == "response.completed"
    answer = last.response
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text.strip() == "Let me see."
    assert [json.loads(item.arguments) for item in answer.output if item.type == "function_call"] == [
        {"city": "Łódź"},
        {"city": "Oslo"},
    ]
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens_details.cached_tokens == 3
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


async def test_the_stream_helper(talk: Talk) -> None:
    served, engine = talk
    engine.reply = CALLS
    async with client_of(served).responses.stream(model="tiny", input="Hi", tools=[WEATHER]) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.function_call_arguments.delta"]
        final = await stream.get_final_response()
    assert snapshots[-1] == '{"city": "Oslo"}'
    whole = await client_of(served).responses.create(model="tiny", input="Hi", tools=[WEATHER])
    assert [_plain(item.to_dict()) for item in final.output] == [_plain(item.to_dict()) for item in whole.output]


async def test_the_client_without_async(talk: Talk) -> None:
    served, _ = talk

    def work() -> tuple[str, str]:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        whole = client.responses.create(model="tiny", input="Hi").output_text
        with client.responses.stream(model="tiny", input="Hi") as stream:
            return whole, stream.until_done().get_final_response().output_text

    assert await asyncio.to_thread(work) == ("Hello, é!", "Hello, é!")


async def test_a_tool_is_used(talk: Talk) -> None:
    """Output items go back as they came, in the way that OpenAI's examples do it."""
    served, engine = talk
    engine.reply = CALLS
    client = client_of(served)
    conversation: list[Any] = [{"role": "user", "content": "Hi"}]
    first = await client.responses.create(model="tiny", input=conversation, tools=[WEATHER])
    conversation += first.output
    for item in first.output:
        if item.type == "function_call":
            output = [{"type": "input_text", "text": "rain"}] if "Oslo" in item.arguments else "sun"
            conversation.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    engine.reply = "Sun and rain."
    second = await client.responses.create(model="tiny", input=conversation, tools=[WEATHER])
    assert second.output_text == "Sun and rain."
    turn = engine.prompt.split("|")
    assert turn[0].startswith("tools:")
    assert turn[1] == "user:Hi"
    assert turn[2].startswith("assistant:<think>Well, é.</think>Let me see.")
    assert turn[2].count("<tool_call>") == 2
    assert turn[3:] == ["tool:sun", "tool:rain", "assistant:"]


async def test_reasoning_can_be_sent_back_sealed(talk: Talk) -> None:
    served, engine = talk
    engine.reply = REASONED + "Yes."
    client = client_of(served)
    answer = await client.responses.create(
        model="tiny", input="Hi", store=False, include=["reasoning.encrypted_content"]
    )
    thought = answer.output[0]
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Well, é."
    assert thought.encrypted_content
    sealed: Any = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    await client.responses.create(model="tiny", input=[sealed, {"role": "assistant", "content": "Yes."}])
    assert engine.prompt == "assistant:<think>Well, é.</think>Yes.|assistant:"
    plain = await client.responses.create(model="tiny", input="Hi")
    assert plain.output[0].to_dict()["encrypted_content"] is None
    for foreign in ("gAAAAA", "sluice:%", "sluice:" + base64.b64encode(b"\xff").decode()):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(model="tiny", input=[{**sealed, "encrypted_content": foreign}])
        assert refusal.value.param == "input[0].encrypted_content"


@pytest.mark.parametrize("reply", ["Hello, é!", CALL, ""])
async def test_a_cut_is_the_same_streamed_and_whole(talk: Talk, reply: str) -> None:
    served, engine = talk
    engine.reply = reply
    client = client_of(served)
    size = len(reply.encode()) + 1
    for limit in range(1, size + 1):
        fields: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": [WEATHER], "max_output_tokens": limit}
        whole = await client.responses.create(**fields)
        final: Response | None = None
        async for event in await client.responses.create(**fields, stream=True):
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
        assert final is not None
        assert _plain(whole.to_dict()) == _plain(final.to_dict())
        assert whole.status == ("completed" if limit == size else "incomplete")
        statuses = [item.to_dict()["status"] for item in whole.output]
        assert statuses[:-1] == ["completed"] * (len(statuses) - 1)
        assert statuses[-1] == whole.status
        reason = whole.incomplete_details and whole.incomplete_details.reason
        assert reason == (None if limit == size else "max_output_tokens")


def _plain(value: Any) -> Any:
    """Without what differs from request to request."""
    if isinstance(value, dict):
        random = {"id", "call_id", "created_at", "completed_at", "parsed", "parsed_arguments"}
        return {key: _plain(item) for key, item in value.items() if key not in random}
    return [_plain(item) for item in value] if isinstance(value, list) else value


async def test_logprobs(talk: Talk) -> None:
    served, _ = talk
    client = client_of(served)
    answer = await client.responses.create(
        model="tiny", input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    message = answer.output[0]
    assert message.type == "message"
    content = message.content[0]
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert b"".join(bytes(score.bytes) for score in content.logprobs).decode() == "Hello, é!"
    assert {len(score.top_logprobs) for score in content.logprobs} == {2}
    plain = await client.responses.create(model="tiny", input="Hi")
    assert plain.output[0].to_dict()["content"][0]["logprobs"] == []


class City(BaseModel):
    name: str
    people: int


async def test_structured_output_is_parsed(talk: Talk) -> None:
    served, engine = talk
    engine.reply = REASONED + '{"name":"Oslo","people":700000}'
    client = client_of(served)
    answer = await client.responses.parse(model="tiny", input="Hi", text_format=City)
    assert answer.output_parsed == City(name="Oslo", people=700000)
    assert engine.requests[-1].constraint is not None
    async with client.responses.stream(model="tiny", input="Hi", text_format=City) as stream:
        assert (await stream.get_final_response()).output_parsed == City(name="Oslo", people=700000)
    schema = {"type": "string", "pattern": "(?=x)"}
    form: Any = {"type": "json_schema", "name": "x", "schema": schema}
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.responses.create(model="tiny", input="Hi", text={"format": form})
    assert refusal.value.param == "text.format.schema"
    assert "'text.format.schema'" in refusal.value.message


async def test_a_failure_in_a_stream(talk: Talk) -> None:
    """The response fails as an event, and the client raises."""
    served, engine = talk
    engine.gate.clear()
    stream = await client_of(served).responses.create(model="tiny", input="Hi", stream=True)
    events = aiter(stream)
    assert [(await anext(events)).type for _ in range(2)] == ["response.created", "response.in_progress"]
    engine.fail("gone")
    failed = await anext(events)
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error is not None
    assert "gone" in failed.response.error.message
    with pytest.raises(openai.APIError, match="gone"):
        await anext(events)


async def test_a_failure_of_a_whole_answer(talk: Talk) -> None:
    served, engine = talk
    engine.gate.clear()
    pending = asyncio.create_task(served.client.post(PATH, json={"input": "Hi"}))
    await engine.until(lambda: len(engine.streams) == 1)
    engine.fail("gone")
    assert "gone" in check_error(await pending, 500)["message"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "at least one item"),
    ({"input": 7}, "input", "a string or a list"),
    ({"input": ["x"]}, "input[0]", "object"),
    ({"input": [{"role": "user"}]}, "input[0].content", "required"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "user"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
     "input[0].content[0]", "text model"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0]", "text"),
    ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type", "input_text"),
    ({"input": [{"role": "user", "content": "\ud800"}]}, "input[0].content", "surrogate"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "required"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id", "before it"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "keeps no responses"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "function_call"),
    ({"input": "x" * 5000}, "input", "--max-model-len"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type", "custom"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
    ({"tools": [{"type": "function", "name": "a", "parameters": 7}]}, "tools[0].parameters", "object"),
    ({"tools": {}}, "tools", "list"),
    ({"tool_choice": "some"}, "tool_choice", "required"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "function"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "json_schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "instructions"),
    ({"text": "x"}, "text", "object"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "whole"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "high"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "standard"),
    ({"include": ["x"]}, "include[0]", "message.output_text.logprobs"),
    ({"include": "x"}, "include", "list"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 3, "min_tokens": 4}, "min_tokens", "3"),
    ({"max_tokens": 3}, "max_tokens", "'max_output_tokens'"),
    ({"temperature": 3}, "temperature", "0 to 2"),
    ({"n": 2}, "n", "one answer"),
    ({"stop": 7}, "stop", "string"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {"a" * 65: "x"}}, "metadata", "64"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16"),
    ({"store": True}, "store", "keeps no responses"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "conversation"),
    ({"conversation": "conv_1"}, "conversation", "keeps no responses"),
    ({"background": True}, "background", "keeps no responses"),
    ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs", "object"),
    ({"instructions": "x", "input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]},
     "input[0].call_id", "1 to 256"),
    ({"text": {"format": {"type": "text", "x": deep(300)}}}, "text", "nested"),
    ({"tools": [{"type": "function", "name": "f", "parameters": deep(300)}], "tool_choice": "none"}, "tools", "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "hint"), REFUSED)
async def test_refusals(talk: Talk, fields: dict[str, Any], param: str, hint: str) -> None:
    served, engine = talk
    for stream in (True, False):
        body = json.dumps({"input": "Hi", **fields, "stream": stream})
        response = await served.client.post(PATH, content=body, headers={"content-type": "application/json"})
        error = check_error(response)
        assert error["param"] == param
        assert hint in error["message"]
    assert not engine.streams


async def test_fields_that_ask_for_nothing_pass(talk: Talk) -> None:
    served, engine = talk
    response = await served.client.post(
        PATH,
        json={
            "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hi"}]}],
            "store": False, "background": False, "truncation": "disabled", "previous_response_id": None, "include": [],
            "text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"summary": "auto"},
            "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "tools": [],
            "tool_choice": "auto", "top_logprobs": 0, "max_tool_calls": 3, "parallel_tool_calls": True, "n": 1,
            "top_k": 5, "seed": 1, "stop": ["é"], "temprature": 1,
        },
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert response.headers["x-sluice-ignored-parameters"] == "temprature"
    assert response.json()["output"][0]["content"][0]["text"] == "Hello, "
    params = engine.requests[-1].params
    assert (params.top_k, params.seed) == (5, 1)


async def test_stream_options(talk: Talk) -> None:
    served, _ = talk
    for stream, options, param in (
        (False, {}, "stream_options"),
        (True, {"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        (True, {"include_usage": 1}, "stream_options.include_usage"),
        (True, {"include_obfuscation": False, "include_usage": True}, None),
    ):
        response = await served.client.post(PATH, json={"input": "Hi", "stream": stream, "stream_options": options})
        if param is None:
            assert response.status_code == 200
        else:
            assert check_error(response)["param"] == param


async def test_an_input_that_no_queue_holds(talk: Talk) -> None:
    """The engine's own refusal names this route's field."""
    served, engine = talk
    engine.max_queued_tokens = 10
    assert check_error(await served.client.post(PATH, json={"input": "Hi" * 20}))["param"] == "input"


async def test_there_is_nothing_to_find(served: Served) -> None:
    paths = (("GET", "/resp_1"), ("DELETE", "/resp_1"), ("GET", "/resp_1/input_items"), ("POST", "/resp_1/cancel"))
    for method, path in paths:
        error = check_error(await served.client.request(method, PATH + path), 404)
        assert "keeps no responses" in error["message"]


async def test_input_tokens(talk: Talk) -> None:
    served, engine = talk
    client = client_of(served)
    fields: dict[str, Any] = {"model": "tiny", "instructions": "Be brief.", "input": "Hi", "tools": [WEATHER]}
    count = await client.responses.input_tokens.count(**fields)
    whole = await client.responses.create(**fields)
    assert whole.usage is not None
    assert count.input_tokens == whole.usage.input_tokens
    assert count.object == "response.input_tokens"
    assert len(engine.streams) == 1
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
    response = await served.client.post("/v1/chat/completions/input_tokens", json=chat)
    assert response.json() == {"input_tokens": len("system:Be brief.|user:Hi|assistant:")}


def test_turns() -> None:
    """The items of one turn of the assistant become one message."""
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    one, two = ({"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in ("one", "two"))
    outputs = [{"type": "function_call_output", "call_id": name, "output": "x"} for name in ("one", "two")]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]}

    def messages(*items: Any) -> list[dict[str, Any]]:
        raw = {"input": list(items)}
        made = to_chat(parse(ResponsesRequest, raw), raw)["messages"]
        assert isinstance(made, list)
        return made

    def calls(*names: str) -> list[dict[str, Any]]:
        return [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in names]

    tools = [{"role": "tool", "tool_call_id": name, "content": "x"} for name in ("one", "two")]
    assert messages(thought, said, one, two, *outputs) == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": calls("one", "two")}, *tools
    ]  # fmt: skip
    assert messages(one, outputs[0], two, outputs[1], said) == [
        {"role": "assistant", "content": None, "tool_calls": calls("one")}, tools[0],
        {"role": "assistant", "content": None, "tool_calls": calls("two")}, tools[1],
        {"role": "assistant", "content": "Yes."},
    ]  # fmt: skip
    assert messages(said, said) == [{"role": "assistant", "content": "Yes."}] * 2
    assert messages(thought, {"role": "user", "content": "Go on."}) == [
        {"role": "assistant", "content": "", "reasoning_content": "Hm."}, {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    assert messages(said, summary, said)[1:] == [
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Short."}
    ]


PARTS = st.lists(
    st.one_of(
        st.builds(Reasoning, st.text(min_size=1, max_size=3)),
        st.builds(Content, st.text(min_size=1, max_size=3)),
        st.lists(st.text(min_size=1, max_size=3), max_size=3),
    ),
    max_size=8,
)


def run(items: ResponseItems, parts: list[Any], status: Status) -> list[dict[str, Any]]:
    """A list among `parts` is a call, of so many pieces of arguments."""
    events = []
    calls = 0
    for part in parts:
        if isinstance(part, list):
            shown: list[Part] = [ToolCallStart(calls, "f", f"c{calls}")]
            shown += [ToolCallArguments(calls, text) for text in part]
            calls += 1
        else:
            shown = [part]
        events += [copy.deepcopy(event) for one in shown for event in items.feed(ChatDelta(0, (one,)))]
    return events + list(items.finish(status))


@given(PARTS, st.sampled_from(("completed", "incomplete")))
def test_events_add_up_to_the_items(parts: list[Any], status: Status) -> None:
    items = ResponseItems("x", sealed=False, scored=False)
    events = run(items, parts, status)
    texts: dict[int, str] = {}
    items_done: list[dict[str, Any]] = []
    for event in events:
        index = event["output_index"]
        assert index == len(items_done)
        if event["type"].endswith(".delta"):
            texts[index] = texts.get(index, "") + event["delta"]
        elif event["type"].endswith("item.done"):
            items_done.append(event["item"])
    assert items_done == items.done
    for index, item in enumerate(items.done):
        shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert shown == texts.get(index, "")
        assert item["status"] == (status if index == len(items.done) - 1 else "completed")
    kinds = [item["type"] for item in items.done]
    assert all(a != b or a == "function_call" for a, b in itertools.pairwise(kinds))


async def test_events_are_named(talk: Talk) -> None:
    served, _ = talk
    response = await served.client.post(PATH, json={"input": "Hi", "stream": True})
    events = named_events(response.text)
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["usage"] is None
    assert "[DONE]" not in response.text
