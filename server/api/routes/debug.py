"""GET /debug/kv: who holds which blocks of the cache. Off unless --debug-endpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.blockmap import block_map
from server.api.errors import APIError, refused
from server.api.service import service_of
from server.generation import EngineError
from server.reports import CacheSnapshot

router = APIRouter(tags=["operations"])

_MAP: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The blocks and who holds them, as JSON or as a map.",
        "content": {"application/json": {}, "text/plain": {"schema": {"type": "string"}}},
    }
}


@router.get("/debug/kv", response_model=CacheSnapshot, responses=_MAP)
async def cache(request: Request, format: Literal["json", "text"] = "json") -> Response:
    """Who holds which blocks of the cache now; with `format=text` as a map for people."""
    service = service_of(request)
    if not service.settings.debug_endpoints:
        raise APIError(404, "/debug/kv is answered only with --debug-endpoints.", code="debug_endpoints_off")
    try:
        snapshot = await service.engine.cache_snapshot()
    except EngineError as error:
        raise refused(error) from error
    if format == "text":
        return Response(await service.in_worker(block_map, snapshot), media_type="text/plain")
    return Response(await service.in_worker(_json, snapshot), media_type="application/json")


def _json(snapshot: CacheSnapshot) -> str:
    return json.dumps(asdict(snapshot))
