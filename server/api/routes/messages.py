"""POST /v1/messages and /v1/messages/count_tokens."""

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
from server.api.fields import read_fields
from server.api.messages.translate import SWITCHES, asks_to_think, to_chat
from server.api.messages.wire import HARMLESS, MESSAGES, CountTokensRequest, MessagesRequest
from server.api.messages.writer import MessagesWriter
from server.api.renaming import Names, renamed
from server.api.wire import STREAMED, parse, request_schema

router = APIRouter(prefix="/v1/messages", tags=["messages"])

ENDPOINT = "messages"
NAMES: Names = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    r"response_format(\.json_schema)?": "output_config.format",
    "reasoning_effort": "output_config.effort",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"tool_choice\.function": "tool_choice",
}


@router.post("", openapi_extra={"requestBody": request_schema(MessagesRequest)}, responses=STREAMED)
async def create_message(request: Request) -> Response:
    """Answer the conversation, streamed as server-sent events or whole."""
    return await serve_chat(request, ENDPOINT, _translate, MessagesWriter, names=NAMES)


@router.post("/count_tokens", openapi_extra={"requestBody": request_schema(CountTokensRequest)})
async def count_message_tokens(request: Request) -> Response:
    """The tokens that the conversation makes as a prompt."""
    return await count_tokens(request, lambda raw: _chat_of(CountTokensRequest, raw), names=NAMES)


def _translate(raw: Mapping[str, Any]) -> Translated:
    return _chat_of(MessagesRequest, raw)


def _chat_of(kind: type[CountTokensRequest], raw: Mapping[str, Any]) -> Translated:
    body, unknown = read_fields(raw, kind, MESSAGES, HARMLESS)
    chat = to_chat(body, raw)
    with renamed(NAMES):
        switches = {"thinking": SWITCHES} if asks_to_think(body) else {}
        return Translated(parse(ChatRequest, chat), unknown, body, switches)
