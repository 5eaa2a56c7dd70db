"""HTTP/1.1 below the routes: what is no request is answered in the shape of every other error, and never waited for.

uvicorn would answer it in plain text, wait without end for a request head that never completes, and follow a body whose
length is told in two ways, which a proxy in front may read differently (RFC 9112, section 6.1).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.applications import Starlette
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from server.api.errors import APIError
from server.api.exchange import UNMATCHED
from server.api.service import Service

logger = logging.getLogger(__name__)

# Longer than the idle timeouts of usual load balancers, so that it is never us who close a connection they reuse.
IDLE_CONNECTION_SECONDS = 75
HEAD_SECONDS = 20.0
"""From the first byte of a request to the end of its headers."""
MAX_HEAD_BYTES = 32 * 2**10

_CODES = {
    400: "invalid_request",
    408: "head_timeout",
    431: "headers_too_large",
    501: "unsupported_transfer_encoding",
}
_HEAD_IS_LONG = f"The request line and headers are larger than the {MAX_HEAD_BYTES} bytes they may have."


class _Connection(h11.Connection):
    """Reports what breaks the protocol to `refuse` instead of raising it."""

    def __init__(self, refuse: Callable[[int, str], None]) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._refuse = refuse

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                _check_head(event)
                return _in_origin_form(event)
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            self._refuse(status, _HEAD_IS_LONG if status == 431 else f"This is not HTTP/1.1: {error}.")
            return h11.NEED_DATA
        return event


def _check_head(request: h11.Request) -> None:
    """Raises RemoteProtocolError for what h11 lets pass."""
    if request.http_version not in (b"1.1", b"1.0"):
        raise h11.RemoteProtocolError("another version of HTTP", error_status_hint=505)
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise h11.RemoteProtocolError("the length of the body is told in two ways")
    lines = sum(len(name) + len(": \r\n") + len(value) for name, value in request.headers)
    if len(request.target) + lines > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError("", error_status_hint=431)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """With a target that begins with the path, as it may begin with a host, too (RFC 9112, section 3.2.2)."""
    found = re.fullmatch(rb"https?://[^/?#]+(/?.*)", request.target, re.IGNORECASE)
    if found is None:
        return request
    target = found[1] if found[1].startswith(b"/") else b"/" + found[1]
    return h11.Request(method=request.method, headers=request.headers, target=target, http_version=request.http_version)


class Protocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Connection(self._refuse)
        self._service: Service = cast(Starlette, config.app).state.service
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        # uvicorn's own timer starts with the first answer.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        """There is nothing to upgrade to; the request is answered as it stands (RFC 9110, section 7.8)."""
        return False

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._refuse(408, f"The headers did not end within {HEAD_SECONDS:g} seconds.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, if that is still possible, and close: where the next request would begin, nobody knows."""
        if self.transport.is_closing():
            return
        error = APIError(status, message, code=_CODES.get(status))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(error.body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + error.body)
        self.transport.close()
        self._service.metrics.http.answered("OTHER", UNMATCHED, status, "refused", 0.0)
        fields = {"status": status, "outcome": "refused", "error": error.code, "client": self.client and self.client[0]}
        logger.info("not a request", extra=fields)
