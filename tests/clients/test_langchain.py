"""langchain-openai, unmodified."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, BaseMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.conftest import City, Served

MESSAGES = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]

pytestmark = pytest.mark.embedded


@tool
def note_city(name: str, districts: int) -> str:
    """Note a city and the number of its districts."""
    return f"{name}: {districts}"


def chat(served: Served, **options: Any) -> ChatOpenAI:
    # By default all models share one async client, which is bound to the event loop that first used it.
    options = {"http_async_client": httpx.AsyncClient(), **options}
    options = {"max_tokens": 24, "temperature": 0, "max_retries": 0, "timeout": 120, **options}
    return ChatOpenAI(base_url=served.api, api_key=served.key, model=served.model, **options)


def joined(chunks: list[Any]) -> BaseMessageChunk:
    whole = AIMessageChunk(content="")
    for chunk in chunks:
        whole += chunk
    return whole


@pytest.mark.parametrize("options", [{}, {"use_responses_api": True}])
def test_a_chat_is_the_same_streamed_async_and_whole(served: Served, options: dict[str, Any]) -> None:
    model = chat(served, stream_usage=True, **options)
    whole = model.invoke(MESSAGES)
    assert "Paris" in whole.text
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0
    streamed = joined(list(model.stream(MESSAGES)))
    assert streamed.text == whole.text
    assert isinstance(streamed, AIMessageChunk)
    assert streamed.usage_metadata is not None
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert asyncio.run(model.ainvoke(MESSAGES)).text == whole.text


def test_batch(served: Served) -> None:
    texts = [message.text for message in chat(served).batch([MESSAGES, MESSAGES, MESSAGES])]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(served: Served, method: Any) -> None:
    structured = chat(served, max_tokens=120).with_structured_output(City, method=method)
    assert isinstance(structured.invoke("A city, please."), City)


def test_a_bound_tool_is_called_streamed_and_whole(served: Served) -> None:
    model = chat(served, max_tokens=200).bind_tools([note_city], tool_choice="note_city", strict=True)
    streamed = joined(list(model.stream("Note that Paris has 20 districts.")))
    whole = model.invoke("Note that Paris has 20 districts.")
    assert [call["name"] for call in whole.tool_calls] == ["note_city"]
    assert whole.tool_calls[0]["args"].keys() == {"name", "districts"}
    assert isinstance(streamed, AIMessageChunk)
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    assert note_city.invoke(whole.tool_calls[0]["args"])


def test_a_prompt_that_is_too_long_is_known_as_such(served: Served) -> None:
    with pytest.raises(ContextOverflowError):
        chat(served).invoke("long " * 9000)


def test_completions(served: Served) -> None:
    model = OpenAI(base_url=served.api, api_key=served.key, model=served.model, temperature=0, max_tokens=12)
    whole = model.invoke("The sea is")
    assert whole
    assert "".join(model.stream("The sea is")) == whole
