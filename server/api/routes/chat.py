"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.count import count_tokens
from server.api.chat.job import Translated
from server.api.chat.serve import serve_chat
from server.api.chat.wire import CHAT, ChatBody, ChatRequest
from server.api.chat.writer import ChatWriter
from server.api.fields import read_fields
from server.api.wire import STREAMED, request_schema

router = APIRouter(tags=["chat"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatBody,
    openapi_extra={"requestBody": request_schema(ChatRequest)},
    responses=STREAMED,
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation with `n` replies; streamed as server-sent events or whole."""
    return await serve_chat(request, "chat", _translate, ChatWriter)


@router.post("/v1/chat/completions/input_tokens", openapi_extra={"requestBody": request_schema(ChatRequest)})
async def count_input_tokens(request: Request) -> Response:
    """The tokens that the conversation makes as a prompt."""
    return await count_tokens(request, _translate)


def _translate(raw: Mapping[str, Any]) -> Translated:
    return Translated(*read_fields(raw, ChatRequest, CHAT))
