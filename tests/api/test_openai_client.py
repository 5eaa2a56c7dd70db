"""The official client, as its users use it."""

from __future__ import annotations

import openai
import pytest

from server.generation import Phase
from tests.api.conftest import Served


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=served.client)


async def test_completions(served: Served) -> None:
    client = client_of(served)
    whole = await client.completions.create(model="tiny", prompt="x", temperature=0, max_tokens=3, logprobs=1, n=2)
    assert [choice.text for choice in whole.choices] == ["abc", "abc"]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = await client.completions.create(
        model="tiny", prompt="x", temperature=0, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "abc"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_best_of_and_suffix(served: Served) -> None:
    client = client_of(served)
    served.engine.bytes.named |= {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}
    best = await client.completions.create(model="tiny", prompt="x", suffix="y", n=1, best_of=3, max_tokens=2, seed=1)
    assert len(best.choices) == 1
    assert best.usage is not None
    assert (best.usage.prompt_tokens, best.usage.completion_tokens) == (5, 6)


async def test_models(served: Served) -> None:
    client = client_of(served)
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("none")


async def test_errors_have_their_classes(served: Served) -> None:
    client = client_of(served)
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="x", temperature=3, stream=True)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="none", prompt="x")
    served.engine.max_open = 0
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="tiny", prompt="x")
    served.engine.phase = Phase.LOADING
    with pytest.raises(openai.InternalServerError) as loading:
        await client.completions.create(model="tiny", prompt="x")
    assert loading.value.status_code == 503


async def test_an_error_in_a_stream_is_raised(served: Served) -> None:
    served.engine.gate.clear()
    stream = await client_of(served).completions.create(model="tiny", prompt="x", stream=True)
    served.engine.fail("gone")
    with pytest.raises(openai.APIError, match="gone"):
        async for _ in stream:
            pass


async def test_closing_a_stream_ends_it(served: Served) -> None:
    engine = served.engine
    engine.step_seconds = 0.01
    stream = await client_of(served).completions.create(model="tiny", prompt="x", stream=True, max_tokens=60, n=2)
    async for _ in stream:
        break
    await stream.close()
    await engine.until(lambda: not engine.open)
    assert [one.closed_by for one in engine.streams] == ["disconnect"] * 2
