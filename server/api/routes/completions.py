"""POST /v1/completions."""

from __future__ import annotations

import json

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import parse_object, read_body
from server.api.completions.job import ENDPOINT, prepare
from server.api.completions.writer import CompletionWriter
from server.api.exchange import exchange_of
from server.api.generation import Generation, counting_refusal, preparing
from server.api.service import service_of
from server.api.sse import EventStream
from server.api.watch import DisconnectWatch
from server.api.wire import CompletionBody, CompletionRequest, request_schema

router = APIRouter(tags=["completions"])

# A larger body is parsed and checked in a worker, so that it does not delay other requests' tokens.
_LARGE_BODY = 64 * 1024
# An answer with more log-probabilities than this takes tens of milliseconds to write, which a worker then does.
_MANY_SCORES = 10_000


@router.post(
    "/v1/completions",
    response_model=CompletionBody,
    openapi_extra={"requestBody": request_schema(CompletionRequest)},
)
async def create_completion(request: Request) -> Response:
    """Continue each prompt `n` times; streamed as server-sent events or whole."""
    service, exchange = service_of(request), exchange_of(request)
    with counting_refusal(service, ENDPOINT, False):
        service.ready_model()
        data = await read_body(request)
        large = len(data) > _LARGE_BODY
        raw = await service.in_large_worker(parse_object, data) if large else parse_object(data)
    watch = DisconnectWatch(request.receive)
    try:
        with preparing(service, ENDPOINT, raw.get("stream") is True):
            job = await watch.guard(prepare(service, exchange.request_id, raw, large))
        generation = Generation(service, exchange, job.requests, job.width)
    except BaseException:
        watch.close()
        raise
    writer = CompletionWriter(job, generation)
    if job.body.stream:
        return EventStream(writer.events(), generation.close, watch, exchange, service.keep_alive, job.headers)
    try:
        answer = await watch.guard(writer.whole())
    finally:
        generation.close()
        watch.close()
    is_long = writer.num_scores > _MANY_SCORES
    body = await service.in_large_worker(_dump, answer) if is_long else _dump(answer)
    return Response(body, 200, job.headers, "application/json")


def _dump(answer: CompletionBody) -> bytes:
    return json.dumps(answer).encode()
