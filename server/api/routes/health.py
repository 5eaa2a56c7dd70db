"""Probes, metrics and the version: small, never logged, never refused for load."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import TypedDict

import server
from server.api.service import service_of
from server.generation import Phase

router = APIRouter(tags=["operations"])


class HealthBody(TypedDict):
    status: str
    phase: str
    detail: str
    running: int
    waiting: int


_UNWELL: dict[int | str, dict[str, Any]] = {503: {"model": HealthBody, "description": "Not now."}}


def _state(request: Request, healthy: set[Phase]) -> Response:
    service = service_of(request)
    status, phase, detail = service.engine.status, service.phase, service.detail
    if service.leaving and phase is Phase.READY:
        phase, detail = Phase.DRAINING, "new requests are taken for a little longer (--drain-delay)"
    stalled = status.stalled_seconds > 0
    well = phase in healthy and not stalled
    if stalled:
        detail = f"a step has not ended for {status.stalled_seconds:.0f} seconds (--stall-timeout)"
    body: HealthBody = {
        "status": "ok" if well else "stalled" if stalled else "unavailable",
        "phase": phase.value,
        "detail": detail,
        "running": status.running,
        "waiting": status.waiting,
    }
    return JSONResponse(body, 200 if well else 503, None if well else {"retry-after": "1"})


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=HealthBody, responses=_UNWELL)
async def health(request: Request) -> Response:
    """200 while the engine can finish what it has accepted, also when it drains.

    503 while it loads, when it is dead, and while a step takes longer than --stall-timeout ("status": "stalled").
    """
    return _state(request, {Phase.READY, Phase.DRAINING})


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=HealthBody, responses=_UNWELL)
async def ready(request: Request) -> Response:
    """200 while new requests are welcome and work goes on; 503, with the phase, otherwise.

    It is 503 from the first signal on, though requests are taken for --drain-delay seconds more.
    """
    return _state(request, {Phase.READY})


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus' text format. Rendered in a thread: scrapes come often and must not delay tokens."""
    service = service_of(request)
    return Response(await service.render_metrics(), headers={"content-type": service.metrics.content_type})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": server.__version__}
