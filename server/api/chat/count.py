"""The length of a chat's prompt, without an answer to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.api.body import parse_object, read_body
from server.api.chat.job import Translated, render_prompt
from server.api.chat.tools import offered_tools
from server.api.parameters import ignored_header
from server.api.renaming import NONE, Names, renamed
from server.api.serve import in_place
from server.api.service import served_name, service_of


async def count_tokens(
    request: Request,
    translate: Callable[[Mapping[str, Any]], Translated],
    *,
    field: str = "messages",
    names: Names = NONE,
    **rest: Any,
) -> Response:
    """`{"input_tokens": n}` with the members of `rest`; the other arguments are as for `serve_chat`.

    A prompt that is too long for an answer is counted like any other. Raises APIError.
    """
    service = service_of(request)
    model, tokenizer = service.ready_model()
    data = await read_body(request)

    def count() -> tuple[int, Translated]:
        translated = translate(parse_object(data))
        body = translated.body
        served_name(body.model, model)
        with renamed(names):
            tools, _ = offered_tools(body.tools, body.tool_choice)
            rendered = render_prompt(body, tools, service.chat_template(tokenizer), model, field)
        return len(rendered.ids), translated

    number, translated = await in_place(request, service, len(data), count)
    body = json.dumps({"input_tokens": number, **rest})
    return Response(body, 200, ignored_header(translated.unknown), "application/json")
