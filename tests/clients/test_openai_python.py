"""OpenAI's own Python package: sync, async, streamed, parsed, with tools, and the Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.clients.conftest import QUESTION, WEATHER, City, Served, check_weather

TOOL: Any = {"type": "function", "function": WEATHER}

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.api, api_key=served.key, max_retries=0, timeout=120) as client:
        yield client


def asked(served: Served, **fields: Any) -> Any:
    return {"model": served.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0, **fields}


def test_a_chat_is_the_same_streamed_async_and_whole(client: OpenAI, served: Served) -> None:
    whole = client.chat.completions.create(**asked(served))
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens is not None

    chunks = list(client.chat.completions.create(**asked(served, stream=True, stream_options={"include_usage": True})))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == choice.message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1

    async def ask() -> tuple[str | None, str]:
        async with AsyncOpenAI(base_url=served.api, api_key=served.key, max_retries=0) as client:
            answer = await client.chat.completions.create(**asked(served))
            stream = await client.chat.completions.create(**asked(served, stream=True))
            return answer.choices[0].message.content, "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == (choice.message.content, choice.message.content)


def test_n_choices_and_log_probabilities(client: OpenAI, served: Served) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    answer = client.chat.completions.create(**asked(served, **fields))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        spelled = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
        assert spelled.startswith((choice.message.content or "").encode())
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_pydantic_model_is_parsed(client: OpenAI, served: Served) -> None:
    fields = {**asked(served, max_tokens=100), "response_format": City}
    parsed = client.chat.completions.parse(**fields).choices[0].message.parsed
    assert isinstance(parsed, City)
    with client.chat.completions.stream(**fields) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_json_object(client: OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(
        **asked(served, max_tokens=200, response_format={"type": "json_object"}, stop=["}"])
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_is_called_and_its_result_answered(client: OpenAI, served: Served, choice: Any) -> None:
    fields = asked(served, max_tokens=120, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    whole = client.chat.completions.create(**fields)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason in ("tool_calls", "stop")
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    check_weather(json.loads(call.function.arguments))

    name, arguments, ids = "", "", set()
    for chunk in client.chat.completions.create(**fields, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.index == 0
            assert delta.function is not None
            ids |= {delta.id} - {None}
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, json.loads(arguments)) == ("get_weather", json.loads(call.function.arguments))
    assert len(ids) == 1

    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
    history = [*QUESTION, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**asked(served, messages=history, tools=[TOOL], tool_choice="none"))
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_the_stream_helper_puts_a_call_together(client: OpenAI, served: Served) -> None:
    tool = openai.pydantic_function_tool(City, name="note_city")
    fields = asked(served, max_tokens=120, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    with client.chat.completions.stream(**fields) as stream:
        stream.until_done()
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, City)


def test_completions(client: OpenAI, served: Served) -> None:
    fields: Any = {"model": served.model, "prompt": ["The sea is", "One, two,"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=1, echo=True)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert [choice.text.startswith(prompt) for choice, prompt in zip(whole.choices, fields["prompt"], strict=True)]
    texts = ["", ""]
    for chunk in client.completions.create(**fields, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_responses(client: OpenAI, served: Served) -> None:
    fields: Any = {"model": served.model, "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**fields, max_output_tokens=24)
    assert "Paris" in whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    text, last = "", None
    for event in client.responses.create(**fields, max_output_tokens=24, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert text == whole.output_text
    assert last is not None
    assert last.type in ("response.completed", "response.incomplete")
    with client.responses.stream(**fields, max_output_tokens=24) as stream:
        stream.until_done()
    parsed = client.responses.parse(**fields, max_output_tokens=100, text_format=City)
    assert isinstance(parsed.output_parsed, City)


def test_responses_call_tools(client: OpenAI, served: Served) -> None:
    fields: Any = {"model": served.model, "input": "The weather in Rome?", "temperature": 0, "max_output_tokens": 120}
    tools: Any = [{"type": "function", "strict": True, **WEATHER}]
    whole = client.responses.create(**fields, tools=tools, tool_choice="required", parallel_tool_calls=False)
    [call] = [item for item in whole.output if item.type == "function_call"]
    assert call.name == "get_weather"
    check_weather(json.loads(call.arguments))
    arguments = ""
    for event in client.responses.create(
        **fields, tools=tools, tool_choice="required", parallel_tool_calls=False, stream=True
    ):
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
    assert json.loads(arguments) == json.loads(call.arguments)


def test_models(client: OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == [served.model]
    assert client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes_and_words(client: OpenAI, served: Served, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**asked(served, temperature=3, stream=stream))
    assert bad.value.param == "temperature"
    assert bad.value.code == "invalid_value"
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            **asked(served, messages=[{"role": "user", "content": "long " * 9000}], stream=stream)
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**asked(served, model="gpt-5", stream=stream))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="sk-wrong").chat.completions.create(**asked(served, stream=stream))
    assert stranger.value.code == "invalid_api_key"
