"""Tool calls and reasoning in chat answers: the same streamed and not, wherever the answer is cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Served, serve_fake
from tests.api.fake_engine import EOS
from tests.api.talking import REASONED, TalkingEngine, TalkingTokenizer, call
from tests.api.test_chat import say

USER = {"role": "user", "content": "time?"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_time", "get_date")
]
TIME, DATE = call("get_time", tz="UTC", note="ü"), call("get_date")
PIECES = [
    "<",
    ">",
    "{",
    '"name"',
    ":",
    '"get_time"',
    "}",
    "é",
    " ",
    "\n",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]
REPLY = f"{REASONED}Let me see.{TIME}{DATE}"


@pytest.fixture
async def talking() -> AsyncIterator[Served]:
    async with serve_fake(TalkingEngine(REPLY)) as served:
        yield served


def engine_of(served: Served) -> TalkingEngine:
    assert isinstance(served.engine, TalkingEngine)
    return served.engine


async def test_reasoning_content_and_calls(talking: Served) -> None:
    answer = await say(talking, messages=[USER], tools=TOOLS)
    choice = answer["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == "Well, é."
    assert message["content"] == "Let me see."
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "get_time", "arguments": json.dumps({"tz": "UTC", "note": "ü"})}
    assert second["function"] == {"name": "get_date", "arguments": "{}"}
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(REASONED.encode())}


async def test_calls_of_all_turns_under_one_request_id_are_told_apart(talking: Served) -> None:
    engine_of(talking).reply = TIME
    first = (await say(talking, messages=[USER], tools=TOOLS))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "noon"}
    second = (await say(talking, messages=[USER, first, result], tools=TOOLS))["choices"][0]["message"]
    assert second["tool_calls"][0]["id"] != first["tool_calls"][0]["id"]


async def test_content_is_null_where_there_are_only_calls(talking: Served) -> None:
    engine_of(talking).reply = f"{REASONED}\n{TIME}"
    message = (await say(talking, messages=[USER], tools=TOOLS))["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 1


async def test_the_same_at_every_cut(talking: Served) -> None:
    """A limit that cuts the answer is told, calls or not; `say` compares the stream with the whole."""
    for cut in range(len(REPLY.encode()) + 1):
        answer = await say(talking, messages=[USER], tools=TOOLS, max_tokens=cut, logprobs=True)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length"
        thought = min(cut, len(REASONED.encode())) if cut > len("<think>") else 0
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
        if cut:
            scores = choice["logprobs"]["content"]
            assert bytes(byte for item in scores for byte in item["bytes"]) == REPLY.encode()[:cut]


async def test_a_stop_string_inside_a_call_makes_it_no_call_to_act_upon(talking: Served) -> None:
    choice = (await say(talking, messages=[USER], tools=TOOLS, stop="UTC"))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "UTC")
    choice = (await say(talking, messages=[USER], tools=TOOLS, stop="<tool_call>"))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Let me see.")
    assert "tool_calls" not in choice["message"]


async def test_one_call_only(talking: Served) -> None:
    """The reply ends with the first call: nothing is made after it, and a limit that is reached there cuts nothing."""
    engine_of(talking).reply = REPLY + "Done."
    most = len(f"{REASONED}Let me see.{TIME}".encode()) - len("}\n</tool_call>")
    for limit in (None, most + 1, most):
        body = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": limit}
        answer = await say(talking, **body)
        assert answer["usage"]["completion_tokens"] == most
        choice = answer["choices"][0]
        assert [item["function"]["name"] for item in choice["message"]["tool_calls"]] == ["get_time"]
        assert choice["message"]["content"] == "Let me see."
        assert choice["finish_reason"] == "tool_calls"


async def test_no_calls_without_tools(talking: Served) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await say(talking, messages=[USER], **fields))["choices"][0]
        assert choice["message"]["content"] == f"Let me see.{TIME}{DATE}"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_variables_that_the_template_does_not_read_are_named(talking: Served) -> None:
    sent = {"enable_thinking": True, "enable_thinkng": True, "documents_first": False}
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9, "thinking": {"type": "enabled"}}),
    ):
        response = await talking.client.post(path, json={**body, "chat_template_kwargs": sent})
        assert response.headers["x-sluice-ignored-parameters"] == "chat_template_kwargs.enable_thinkng"


async def test_reasoning_may_be_left_out(talking: Served) -> None:
    answer = await say(talking, messages=[USER], include_reasoning=False)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(REASONED.encode())


async def test_markers_that_are_special_tokens_reach_the_parser(talking: Served) -> None:
    """The engine is asked to show the markup's special tokens, whatever `skip_special_tokens` says of others."""

    class Marked(TalkingTokenizer):
        special_ids = frozenset({300, EOS})

        def token_id(self, text: str) -> int | None:
            return 300 if text == "<tool_call>" else None

    engine_of(talking).bytes = Marked()
    await say(talking, messages=[USER], tools=TOOLS, max_tokens=1)
    assert engine_of(talking).requests[0].shown_special_ids == {300}


async def test_the_official_client_collects_calls(talking: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0, http_client=talking.client)
    tools: list[Any] = TOOLS
    messages: list[Any] = [USER]
    async with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [item.function.name for item in calls] == ["get_time", "get_date"]
    assert final.choices[0].finish_reason == "tool_calls"
    reply = final.choices[0].message.model_dump(exclude={"parsed"})  # as it came, other unknown members included
    messages = [USER, reply, *({"role": "tool", "tool_call_id": item.id, "content": "noon"} for item in calls)]
    await client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    assert "<tool_call>" in engine_of(talking).prompt


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from([*PIECES, TIME])))
async def test_any_reply_is_the_same_streamed_and_whole(talking: Served, pieces: list[str]) -> None:
    engine_of(talking).reply = "".join(pieces)
    await say(talking, messages=[USER], tools=TOOLS, logprobs=True)
