"""What the routes that are a chat in other words share: they translate the body, and write the reply their own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.job import ChatJob, Translated, prepare
from server.api.errors import APIError
from server.api.exchange import Exchange
from server.api.generation import Generation
from server.api.renaming import NONE, Names, renamed
from server.api.serve import Writer, serve
from server.api.service import Service

Translate = Callable[[Mapping[str, Any]], Translated]
MakeWriter = Callable[[ChatJob, Generation], Writer]


async def serve_chat(
    request: Request,
    endpoint: str,
    translate: Translate,
    make_writer: MakeWriter,
    *,
    field: str = "messages",
    names: Names = NONE,
) -> Response:
    """Answer a chat, streamed or whole.

    translate: makes the chat of a body, in a worker; raises APIError.
    field: what the route calls the conversation, for errors about its length.
    names: what it calls other fields of the chat, for errors that are found after the translation.
    """

    async def job(service: Service, exchange: Exchange, raw: dict[str, Any], large: bool) -> ChatJob:
        def prepared() -> ChatJob:
            translated = translate(raw)
            with renamed(names):
                return prepare(service, exchange, translated, endpoint=endpoint, field=field)

        return await (service.in_large_worker if large else service.in_worker)(prepared)

    try:
        return await serve(request, endpoint, job, make_writer)
    except APIError as error:
        if error.reason == "too_long":
            error.param = field  # the engine's own refusals know only prompts
        raise
