"""POST /v1/responses, stateless: what would need a memory of earlier responses is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.count import count_tokens
from server.api.chat.job import Translated
from server.api.chat.serve import serve_chat
from server.api.chat.wire import ChatRequest
from server.api.errors import APIError
from server.api.fields import read_fields
from server.api.renaming import Names, renamed
from server.api.responses.translate import to_chat
from server.api.responses.wire import HARMLESS, RESPONSES, STATELESS, ResponsesRequest
from server.api.responses.writer import ResponsesWriter
from server.api.wire import STREAMED, parse, request_schema

router = APIRouter(prefix="/v1/responses", tags=["responses"])

ENDPOINT = "responses"
NAMES: Names = {
    "max_(completion_)?tokens": "max_output_tokens",
    "messages": "input",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}


@router.post("", openapi_extra={"requestBody": request_schema(ResponsesRequest)}, responses=STREAMED)
async def create_response(request: Request) -> Response:
    """Answer the input, streamed as server-sent events or whole."""
    return await serve_chat(request, ENDPOINT, _translate, ResponsesWriter, field="input", names=NAMES)


@router.post("/input_tokens", openapi_extra={"requestBody": request_schema(ResponsesRequest)})
async def count_input_tokens(request: Request) -> Response:
    """The tokens that the input makes as a prompt."""
    return await count_tokens(request, _translate, field="input", names=NAMES, object="response.input_tokens")


def _translate(raw: Mapping[str, Any]) -> Translated:
    body, unknown = read_fields(raw, ResponsesRequest, RESPONSES, HARMLESS)
    chat = to_chat(body, raw)
    with renamed(NAMES):
        return Translated(parse(ChatRequest, chat), unknown, body)


@router.get("/resp_{rest}")
@router.delete("/resp_{rest}")
@router.get("/resp_{rest}/input_items")
@router.post("/resp_{rest}/cancel")
async def find_response(rest: str) -> Response:
    """None is kept, so there is none to find."""
    raise APIError(404, f"There are no stored responses: {STATELESS}.", param="response_id", code="response_not_found")
