"""From a request for a generation to its answer: what all generating routes do around their own job and writer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from server.api.body import parse_object, read_body
from server.api.errors import APIError
from server.api.exchange import Exchange, exchange_of
from server.api.generation import Generation, counting_refusal, holding_place, preparing
from server.api.large import dump
from server.api.service import Service, service_of
from server.api.sse import EventStream
from server.api.watch import DisconnectWatch
from server.generation import GenerationRequest

# All bodies are checked in workers; a larger one has its own, where it delays no small one, and is parsed there too.
LARGE_BODY = 64 * 1024
# An answer with more numbers than this takes milliseconds to write, which a worker then does.
_MANY_NUMBERS = 10_000


class Job(Protocol):
    """A body that has passed every check. `width` sequences of `requests` share each prompt."""

    @property
    def requests(self) -> Sequence[GenerationRequest]: ...

    @property
    def width(self) -> int: ...

    @property
    def streaming(self) -> bool: ...

    @property
    def headers(self) -> Mapping[str, str]: ...


class Writer(Protocol):
    """Writes the outputs of a generation, either as one body or as events; only one of the two is called."""

    @property
    def num_numbers(self) -> int:
        """Log-probabilities and token ids in the whole answer, at most."""
        ...

    async def whole(self) -> Mapping[str, Any]: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...

    def failure(self, error: APIError) -> bytes:
        """The last event of a stream that fails."""
        ...


J = TypeVar("J", bound=Job)
T = TypeVar("T")
Prepare = Callable[[Service, Exchange, dict[str, Any], bool], Coroutine[Any, Any, J]]


async def in_place(request: Request, service: Service, size: int, function: Callable[[], T]) -> T:
    """The result of `function`, which works on a body of `size` bytes, from a worker.

    Until then the request has a place in the queue; if the client goes away, it does not wait for its turn any more.
    Raises APIError and ClientGone.
    """
    watch = DisconnectWatch(request.receive)
    try:
        with holding_place(service):
            return await watch.guard((service.in_large_worker if size > LARGE_BODY else service.in_worker)(function))
    finally:
        watch.close()


async def serve(
    request: Request, endpoint: str, prepare: Prepare[J], make_writer: Callable[[J, Generation], Writer]
) -> Response:
    """Answer `request`, streamed or whole, as its body says.

    prepare: makes the job of (service, exchange, body, whether the body is large). All that can be refused is refused
        there, before the status line of a stream goes out. Raises APIError.
    """
    service, exchange = service_of(request), exchange_of(request)
    job, generation, watch = await _begin(request, service, exchange, endpoint, prepare)
    try:
        writer = make_writer(job, generation)
    except BaseException:
        generation.close()
        watch.close()
        raise
    if job.streaming:
        return EventStream(
            writer.events(), generation.close, watch, exchange, service.keep_alive, job.headers, writer.failure
        )
    try:
        answer = await watch.guard(writer.whole())
    finally:
        generation.close()
        watch.close()
    large = writer.num_numbers > _MANY_NUMBERS
    body = await service.in_large_worker(dump, answer) if large else json.dumps(answer)
    return Response(body, 200, job.headers, "application/json")


async def _begin(
    request: Request, service: Service, exchange: Exchange, endpoint: str, prepare: Prepare[J]
) -> tuple[J, Generation, DisconnectWatch]:
    """The job and its sequences, submitted; the caller closes both others. The body is gone by then."""
    with counting_refusal(service, endpoint, False):
        data = await read_body(request)  # even to refuse it: a client that still sends would not read why
        service.ready_model()
        large = len(data) > LARGE_BODY
        raw = await service.in_large_worker(parse_object, data) if large else parse_object(data)
    watch = DisconnectWatch(request.receive)
    try:
        with preparing(service, endpoint, raw.get("stream") is True):
            job = await watch.guard(prepare(service, exchange, raw, large))
        return job, Generation(service, exchange, job.requests, job.width), watch
    except BaseException:
        watch.close()
        raise
