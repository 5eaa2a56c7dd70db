"""POST /v1/chat/completions over an engine whose output is known."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import server
from server.generation import GenerationRequest
from tests.api.conftest import Serve, Served, parse_events
from tests.api.fake_engine import EOS, FakeEngine
from tests.api.test_validation import check_error
from tests.chat_stream import joined

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
ZERO_DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}


async def say(served: Served, **body: Any) -> dict[str, Any]:
    """The whole answer, after the streamed one was found to be the same."""
    body = {"model": "tiny", "messages": [USER], "temperature": 0, **body}
    headers = {"x-request-id": "same"}
    response = await served.client.post(PATH, json=body, headers=headers)
    assert response.status_code == 200, response.text
    answer = response.json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await served.client.post(PATH, json={**body, **options}, headers=headers)
    assert streamed.status_code == 200, streamed.text
    events = parse_events(streamed.text)
    assert events.pop() == "[DONE]"
    assert all(event["usage"] is None for event in events[:-1])
    assert joined(events) == {**answer, "created": events[0]["created"]}
    assert isinstance(answer, dict)
    return answer


def writes(engine: FakeEngine, text: str) -> None:
    """Makes the engine say `text` and end there."""
    engine.tokens = lambda request: [*text.encode(), EOS]


def prompt(request: GenerationRequest) -> str:
    return bytes(request.prompt_ids).decode()


async def test_an_answer(served: Served) -> None:
    answer = await say(served, max_tokens=4)
    assert answer.pop("created") > 0
    assert answer == {
        "id": "chatcmpl-same",
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": f"sluice-{server.__version__}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abcd", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11, **ZERO_DETAILS},
    }


async def test_the_end_of_sequence_and_stop_strings_end_it(served: Served) -> None:
    writes(served.engine, "yes")
    choice = (await say(served))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("yes", "stop", None)
    choice = (await say(served, stop="e"))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("y", "stop", "e")


async def test_usage_in_a_stream_comes_only_when_asked_for(served: Served) -> None:
    for options, chunks in ((None, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)):
        body = {"messages": [USER], "max_tokens": 2, "stream": True, "stream_options": options}
        events = parse_events((await served.client.post(PATH, json=body)).text)
        assert events[-1] == "[DONE]"
        assert sum("usage" in event and event["usage"] is not None for event in events[:-1]) == chunks
        assert len([event for event in events[:-1] if not event["choices"]]) == chunks
    body["stream_options"] = {"continuous_usage_stats": True}
    events = parse_events((await served.client.post(PATH, json=body)).text)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 1, 2, 2]


async def test_choices_of_one_prompt(served: Served) -> None:
    served.engine.cached_tokens = 3
    answer = await say(served, n=3, seed=2, temperature=1, max_tokens=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    leaders = [request.leader for request in served.engine.requests[:3]]
    assert leaders == [None, served.engine.requests[0].request_id, served.engine.requests[0].request_id]


async def test_the_prompt_is_the_template_of_all_messages(served: Served) -> None:
    await say(
        served,
        max_tokens=1,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " é"}]},
            {"role": "user", "content": "1", "name": "ann"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
            {"role": "user", "content": "2"},
        ],
    )
    assert prompt(served.engine.requests[0]) == "s:Be é|u:1|a:no|u:2|a:"


async def test_a_message_may_be_continued(served: Served) -> None:
    messages = [USER, {"role": "assistant", "content": "The"}]
    await say(served, max_tokens=1, messages=messages, add_generation_prompt=False)
    assert prompt(served.engine.requests[0]) == "u:Hi|a:The|"


async def test_the_template_sees_calls_tools_and_variables(served: Served) -> None:
    template = "{{ tools | tojson }}{{ x }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    served.engine.bytes.chat_templates = {"default": template}
    served.engine.card = FakeEngine(max_model_len=2048).card
    tools = [{"type": "function", "function": {"name": "get", "strict": True}}]
    messages = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [call('{"a": 1}'), call("{", "c2")],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]
    await say(served, max_tokens=1, messages=messages, tools=tools, chat_template_kwargs={"x": "X"})
    shown, _, rest = prompt(served.engine.requests[0]).partition("X")
    assert json.loads(shown)[0]["function"]["name"] == "get"
    user, assistant, tool = (json.loads(part) for part in rest.replace("}{", "}\n{").split("\n"))
    assert user == USER
    assert assistant["reasoning_content"] == "hm"
    assert [item["function"]["arguments"] for item in assistant["tool_calls"]] == [{"a": 1}, "{"]
    assert tool == {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "4"}


async def test_tools_are_not_shown_to_a_model_that_must_not_call(served: Served) -> None:
    served.engine.bytes.chat_templates = {"default": "{{ tools is none }}"}
    tools = [{"type": "function", "function": {"name": "get"}}]
    await say(served, max_tokens=1, tools=tools, tool_choice="none")
    await say(served, max_tokens=1, tools=tools)
    assert [prompt(request) for request in served.engine.requests[::2]] == ["True", "False"]


@pytest.mark.parametrize(
    ("source", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "high", "True"),
        ("-", "none", "-"),
    ],
)
async def test_reasoning_effort_is_the_templates(served: Served, source: str, effort: str, expected: str) -> None:
    served.engine.bytes.chat_templates = {"default": source}
    await say(served, max_tokens=1, reasoning_effort=effort)
    assert prompt(served.engine.requests[0]) == expected


def call(arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 57),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 65535}, 57),
        ({"max_tokens": 0}, 0),
    ],
)
async def test_the_limit_is_a_cap(served: Served, fields: dict[str, Any], tokens: int) -> None:
    answer = await say(served, **fields)
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_conversation_without_room_is_refused_with_both_numbers(served: Served) -> None:
    for text in ("x" * 60, "x" * 100):
        messages = [{"role": "user", "content": text}]
        error = check_error(await served.client.post(PATH, json={"messages": messages}))
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert "64" in error["message"]
        assert str(len(text) + (5 if len(text) < 64 else 0)) in error["message"]


async def test_log_probabilities(served: Served) -> None:
    served.engine.tokens = lambda request: [*"a🦜b".encode(), EOS]
    answer = await say(served, logprobs=True, top_logprobs=2)
    scores = answer["choices"][0]["logprobs"]
    assert scores["refusal"] is None
    assert [item["token"] for item in scores["content"]] == ["a", "\\xf0", "\\x9f", "\\xa6", "\\x9c", "b", "</s>"]
    assert bytes(byte for item in scores["content"] for byte in item["bytes"]).decode() == "a🦜b"
    assert len(scores["content"]) == answer["usage"]["completion_tokens"]
    assert scores["content"][0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "b", "logprob": -1.5, "bytes": [98]},
    ]


async def test_log_probabilities_of_the_chosen_tokens_alone(served: Served) -> None:
    for fields in ({"top_logprobs": None}, {"top_logprobs": 0}, {}):
        content = (await say(served, logprobs=True, max_tokens=2, **fields))["choices"][0]["logprobs"]["content"]
        assert [(item["token"], item["top_logprobs"]) for item in content] == [("a", []), ("b", [])]
    assert (await say(served, logprobs=False, max_tokens=1))["choices"][0]["logprobs"] is None


async def test_unknown_fields_are_named_in_a_header(served: Served) -> None:
    body = {"messages": [USER], "max_tokens": 1, "colour": 1, "user": "u", "metadata": {}, "store": False}
    response = await served.client.post(PATH, json=body)
    assert response.headers["x-sluice-ignored-parameters"] == "colour"


GET = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [USER] * 4097}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": ""}]}, "messages[0].name"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "content": "x", "prefix": True}]}, "messages[0].prefix"),
    ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [call("{}", "")]}]}, "messages[0].tool_calls[0].id"),
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [GET, GET]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any", "tools": [GET]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "get"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [GET]}, "tool_choice.function.name"),
    ({"functions": [{"name": "x"}]}, "functions"),
    ({"function_call": {"name": "x"}}, "function_call"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"min_tokens": 4, "max_completion_tokens": 3}, "min_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"n": 5_000_000}, "n"),
    ({"stop": 7}, "stop"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"chat_template": "x"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"verbosity": "low"}, "verbosity"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]
MEDIA = [
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "video_url", "video_url": {"url": "x"}},
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
async def test_refusals_name_the_field_and_come_before_a_200(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({"messages": [USER], **fields})
    headers = {"content-type": "application/json"}
    whole = check_error(await served.client.post(PATH, content=body, headers=headers))
    assert whole["param"] == param
    if "stream_options" not in fields:
        body = json.dumps({"messages": [USER], **fields, "stream": True})
        assert check_error(await served.client.post(PATH, content=body, headers=headers)) == whole
    assert not served.engine.requests


@pytest.mark.parametrize("part", MEDIA)
async def test_other_parts_are_refused_by_their_type(served: Served, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    error = check_error(await served.client.post(PATH, json={"messages": messages}))
    assert error["param"] == "messages[0].content[1]"
    assert part["type"] in error["message"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "auto"},
                                    {"functions": []}, {"echo": False}, {"modalities": ["text"]}, {"best_of": 1},
                                    {"response_format": {"type": "text"}}, {"parallel_tool_calls": True}])  # fmt: skip
async def test_fields_that_ask_for_nothing_pass(served: Served, fields: dict[str, Any]) -> None:
    await say(served, max_tokens=1, **fields)


async def test_a_template_that_refuses_is_a_400(served: Served) -> None:
    served.engine.bytes.chat_templates = {"default": "{{ raise_exception('roles must alternate') }}"}
    error = check_error(await served.client.post(PATH, json={"messages": [USER], "stream": True}))
    assert error["code"] == "template_failed"
    assert "roles must alternate" in error["message"]


async def test_a_model_without_a_template_says_how_to_give_one(served: Served) -> None:
    served.engine.bytes.chat_templates = {}
    error = check_error(await served.client.post(PATH, json={"messages": [USER]}))
    assert error["code"] == "no_chat_template"
    assert "--chat-template" in error["message"]


async def test_deep_nesting_is_a_400_or_text(serve: Serve) -> None:
    async with serve(FakeEngine(max_model_len=10**6)) as served:
        for depth in (100, 5000):
            deep = "[" * depth + "]" * depth
            for body in (
                f'{{"messages": {deep}}}',
                f'{{"messages": [{{"role": "user", "content": {deep}}}]}}',
                f'{{"messages": [{json.dumps(USER)}], "tools": {deep}}}',
                f'{{"messages": [{json.dumps(USER)}], "chat_template_kwargs": {{"x": {deep}}}, "max_tokens": 1}}',
            ):
                response = await served.client.post(PATH, content=body, headers={"content-type": "application/json"})
                assert response.status_code in (200, 400), response.text


async def test_the_official_client(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=served.client)
    messages: list[Any] = [USER]
    writes(served.engine, "abc")
    whole = await client.chat.completions.create(model="tiny", messages=messages, temperature=0, n=2)
    assert [choice.message.content for choice in whole.choices] == ["abc", "abc"]
    async with client.chat.completions.stream(model="tiny", messages=messages, temperature=0, logprobs=True) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert deltas == ["", "a", "b", "c"]
    assert final.choices[0].message.content == "abc"
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content is not None
    assert [item.token for item in final.choices[0].logprobs.content] == ["a", "b", "c", "</s>"]
