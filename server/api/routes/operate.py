"""GET /load, for routers in front, and DELETE /v1/requests/{id}, which ends a request that somebody else waits for."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from typing_extensions import TypedDict

from server.api.errors import APIError, show
from server.api.exchange import exchange_of
from server.api.service import service_of

router = APIRouter(tags=["operations"])

_BODY_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class LoadBody(TypedDict):
    """Sequences that run and wait, prompt tokens that wait, the share (0 to 1) of the cache in use, and the limits.

    server_load: running and waiting together, as vLLM names it.
    """

    server_load: int
    running: int
    waiting: int
    waiting_tokens: int
    kv_cache_usage: float
    max_num_seqs: int
    max_queued_requests: int
    max_queued_tokens: int


class AbortedBody(TypedDict):
    """`aborted`: the sequences that were ended, one a choice; those that had finished are not among them."""

    request_id: str
    aborted: list[str]


@router.get("/load")
async def load(request: Request) -> LoadBody:
    """How busy the server is now."""
    status = service_of(request).engine.status
    return {
        "server_load": status.running + status.waiting,
        "running": status.running,
        "waiting": status.waiting,
        "waiting_tokens": status.waiting_tokens,
        "kv_cache_usage": status.kv_usage,
        "max_num_seqs": status.max_num_seqs,
        "max_queued_requests": status.max_queued_requests,
        "max_queued_tokens": status.max_queued_tokens,
    }


@router.delete("/v1/requests/{request_id}")
async def abort(request: Request, request_id: str) -> AbortedBody:
    """End an open request by its `x-request-id`, or by the `id` of its answer. Its reader gets an error.

    With API keys in use a key's holder can end the holder's own requests only.
    """
    service, tenant = service_of(request), exchange_of(request).tenant
    for known in _meanings(request_id):
        aborted = service.abort(known, tenant)
        if aborted is not None:
            return {"request_id": known, "aborted": aborted}
    raise APIError(404, f"There is no open request {show(request_id)}.", param="request_id", code="request_not_found")


def _meanings(request_id: str) -> list[str]:
    return [request_id, *(request_id.removeprefix(p) for p in _BODY_PREFIXES if request_id.startswith(p))]
