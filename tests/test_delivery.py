"""A stream between an engine that is faster than its reader, and a reader who may go away."""

from __future__ import annotations

import asyncio

import pytest

from server.delivery import GenerationStream
from server.generation import GenerationFailed, Output, OutputToken, Usage
from server.step import TokenLogprobs


class Aborts(list[tuple[str, str]]):
    def __call__(self, request_id: str, cause: str) -> None:
        self.append((request_id, cause))


@pytest.fixture
def aborts() -> Aborts:
    return Aborts()


@pytest.fixture
def stream(aborts: Aborts) -> GenerationStream:
    return GenerationStream("r", aborts)


def output(
    number: int,
    finish_reason: str | None = None,
    stop_reason: str | None = None,
    scores: tuple[TokenLogprobs | None, ...] | None = None,
) -> Output:
    token = OutputToken(number, str(number))
    return Output(str(number), (token,), Usage(3, number, 0), finish_reason, stop_reason, scores)


async def test_a_slow_reader_gets_everything_in_fewer_outputs(stream: GenerationStream) -> None:
    scores = (None, TokenLogprobs(5, -1.0))
    stream.deliver(output(1, scores=scores))
    stream.deliver(output(2))
    stream.deliver(output(3, "stop", "x"))
    (joined,) = [each async for each in stream]
    assert joined.text == "123"
    assert [token.token_id for token in joined.tokens] == [1, 2, 3]
    assert joined.usage == Usage(3, 3, 0)
    assert (joined.finish_reason, joined.stop_reason) == ("stop", "x")
    assert joined.prompt_logprobs == scores


async def test_a_fast_reader_gets_each_output_when_it_comes(stream: GenerationStream) -> None:
    for number in range(1, 4):
        read = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        assert not read.done()
        stream.deliver(output(number, "length" if number == 3 else None))
        assert (await read).text == str(number)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_what_came_before_a_failure_is_read_before_it(stream: GenerationStream) -> None:
    stream.deliver(output(1))
    stream.deliver(GenerationFailed("gone"))
    assert (await anext(stream)).text == "1"
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="gone"):
            await anext(stream)


async def test_closing_ends_the_request_once(stream: GenerationStream, aborts: Aborts) -> None:
    stream.close()
    stream.close("api")
    assert aborts == [("r", "disconnect")]
    stream.deliver(output(0, "abort"))


@pytest.mark.parametrize("last", [output(1, "stop"), GenerationFailed("gone")])
async def test_what_is_over_is_not_ended_again(
    stream: GenerationStream, aborts: Aborts, last: Output | Exception
) -> None:
    stream.deliver(last)
    stream.close()
    assert aborts == []
