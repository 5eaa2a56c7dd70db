"""litellm, unmodified, as its `openai/`, `text-completion-openai/` and `anthropic/` providers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.clients.conftest import QUESTION, WEATHER, City, Served, check_weather

TOOL = {"type": "function", "function": WEATHER}

pytestmark = pytest.mark.embedded


def asked(served: Served, **fields: Any) -> dict[str, Any]:
    common = {"api_key": served.key, "max_retries": 0, "timeout": 120, "max_tokens": 24, "temperature": 0}
    return {
        "model": f"openai/{served.model}",
        "api_base": served.api,
        "messages": QUESTION,
        **common,
        **fields,
    }


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def test_a_chat_is_the_same_streamed_async_and_whole(served: Served) -> None:
    whole = litellm.completion(**asked(served))
    assert "Paris" in text_of(whole)
    chunks = list(litellm.completion(**asked(served, stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text_of(whole)
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usages[-1].total_tokens == whole.usage.total_tokens

    async def ask() -> str:
        stream = await litellm.acompletion(**asked(served, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == text_of(whole)


def test_text_completion(served: Served) -> None:
    fields = asked(served, model=f"text-completion-openai/{served.model}", prompt="The sea is")
    del fields["messages"]
    whole = litellm.text_completion(**fields)
    assert whole.choices[0].text
    chunks = litellm.text_completion(**fields, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text


def test_a_tool_is_called_streamed_and_whole(served: Served) -> None:
    fields = asked(served, max_tokens=120, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    whole = litellm.completion(**fields)
    [call] = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    check_weather(json.loads(call.function.arguments))
    built = litellm.stream_chunk_builder(list(litellm.completion(**fields, stream=True)))
    [streamed] = built.choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_a_pydantic_model_is_filled(served: Served) -> None:
    answer = litellm.completion(**asked(served, max_tokens=100, response_format=City))
    City.model_validate_json(text_of(answer))


def test_messages_through_anthropics_provider(served: Served) -> None:
    fields = asked(served, model=f"anthropic/{served.model}", api_base=served.url)
    whole = litellm.completion(**fields)
    assert "Paris" in text_of(whole)
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(whole)


def test_errors_have_their_classes(served: Served) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**asked(served, temperature=3))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked(served, messages=[{"role": "user", "content": "long " * 9000}]))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked(served, model="openai/gpt-none"))
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked(served, api_key="sk-wrong"))
