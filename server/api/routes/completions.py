"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.completions.job import ENDPOINT, prepare
from server.api.completions.writer import CompletionWriter
from server.api.serve import serve
from server.api.wire import STREAMED, CompletionBody, CompletionRequest, request_schema

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    response_model=CompletionBody,
    openapi_extra={"requestBody": request_schema(CompletionRequest)},
    responses=STREAMED,
)
async def create_completion(request: Request) -> Response:
    """Continue each prompt `n` times; streamed as server-sent events or whole."""
    return await serve(request, ENDPOINT, prepare, CompletionWriter)
