"""Around every request: its id, its metric, its line in the log, and an answer if the code below fails."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import internal_error, is_messages
from server.api.service import Service

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_MESSAGES_ID_HEADER = b"request-id"  # where Anthropic's clients look for it
UNMATCHED = "unmatched"
"""The route of what reached none, in metrics and log: a path would make endless series."""

_LONGEST_PATH = 100
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_PROBES = frozenset({"/health", "/ready", "/metrics", "/load"})


@dataclass(slots=True)
class Exchange:
    """One request and its answer. `notes` are what its line in the log says beside the usual.

    tenant: the name of the API key it came with, "" where no key is asked for.
    submitted: when the engine took it, None if it did not come to that; like `started` on the monotonic clock.
    outcome: "refused" is an answer of 4xx, "error" one of 5xx or a stream that broke off after its 200.
    """

    request_id: str
    tenant: str = ""
    started: float = field(default_factory=time.monotonic)
    submitted: float | None = None
    outcome: Literal["ok", "refused", "error", "disconnect"] = "ok"
    notes: dict[str, object] = field(default_factory=dict)


Recorder: TypeAlias = Callable[[Exchange, Headers, str, str, int], str | None]
"""Takes an exchange that is over, its headers, method, route and status, and may give it the id of a trace."""


def exchange_of(request: Request) -> Exchange:
    exchange = request.state.exchange
    assert isinstance(exchange, Exchange)
    return exchange


def _request_id(headers: Headers) -> str:
    """The client's own id if it is one that may stand in headers, bodies and logs, else a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else uuid.uuid4().hex


class ExchangeMiddleware:
    """Plain ASGI: it touches the start of a response and lets its parts through untouched."""

    def __init__(self, app: ASGIApp, service: Service, record: Recorder | None) -> None:
        self._app = app
        self._service = service
        self._trace = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(_request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["exchange"] = exchange
        status = 0
        id_value = exchange.request_id.encode()
        id_headers = [(REQUEST_ID_HEADER.encode(), id_value)]
        if is_messages(scope["path"]):
            id_headers.append((_MESSAGES_ID_HEADER, id_value))

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # A proxy must not send its next request on a connection that is about to end.
                closing = [(b"connection", b"close")] if self._service.leaving else []
                message = {**message, "headers": [*message["headers"], *id_headers, *closing]}
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except Exception:
            exchange.outcome = "error"
            if status:  # too late for another answer: the connection must break
                raise
            logger.exception("request %s failed", exchange.request_id)
            failure = internal_error().response(scope["path"], exchange.request_id)
            await failure(scope, receive, send_marked)
        finally:
            self._record(scope, exchange, status)

    def _record(self, scope: Scope, exchange: Exchange, status: int) -> None:
        if status == 499 or not status:
            exchange.outcome = "disconnect"
        elif status >= 500:
            exchange.outcome = "error"
        elif status >= 400:
            exchange.outcome = "refused"
        seconds = time.monotonic() - exchange.started
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        route = scope["route"].path_format if "route" in scope else UNMATCHED
        self._service.metrics.http.answered(method, route, status or 499, exchange.outcome, seconds)
        if route in _PROBES:
            return
        trace_id = None
        if self._trace is not None:
            trace_id = self._trace(exchange, Headers(scope=scope), method, route, status or 499)
        fields: dict[str, object] = {
            "request_id": exchange.request_id,
            "trace_id": trace_id,
            "tenant": exchange.tenant or None,
            "method": method,
            "route": route,
            "path": scope["path"][:_LONGEST_PATH] if route is UNMATCHED else None,
            "status": status or 499,
            "outcome": exchange.outcome,
            "total_ms": round(seconds * 1000, 1),
            **exchange.notes,
        }
        logger.info("request", extra={name: value for name, value in fields.items() if value is not None})
