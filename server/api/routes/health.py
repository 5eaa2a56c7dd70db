"""Probes, metrics and the version: small, never logged, never refused for load."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import server
from server.api.service import service_of
from server.generation import Phase

router = APIRouter(tags=["operations"])


def _state(request: Request, healthy: set[Phase]) -> Response:
    service = service_of(request)
    status, phase = service.engine.status, service.phase
    well = phase in healthy
    body = {
        "status": "ok" if well else "unavailable",
        "phase": phase.value,
        "detail": status.detail,
        "running": status.running,
        "waiting": status.waiting,
    }
    return JSONResponse(body, 200 if well else 503, None if well else {"retry-after": "1"})


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine can finish what it has accepted, also when it drains; 503 while loading and when dead."""
    return _state(request, {Phase.READY, Phase.DRAINING})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while new requests are taken; 503, with the phase, otherwise."""
    return _state(request, {Phase.READY})


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format. Rendered in a thread: scrapes come often and must not delay tokens."""
    service = service_of(request)
    return Response(await service.render_metrics(), headers={"content-type": service.metrics.content_type})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": server.__version__}
