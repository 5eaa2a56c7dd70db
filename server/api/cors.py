"""Cross-origin requests: which web pages' scripts may call the server. Off unless --cors-origin names some."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from server.api.errors import APIError
from server.api.exchange import REQUEST_ID_HEADER
from server.api.parameters import IGNORED_HEADER

_METHODS = ("DELETE", "GET", "HEAD", "POST")
_EXPOSED = (REQUEST_ID_HEADER, "request-id", "retry-after", IGNORED_HEADER)


class Cors(CORSMiddleware):
    """Cookies are never asked for, so any request header may be sent: a page can say only what its own code knows."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(app, origins, allow_methods=_METHODS, allow_headers=("*",), expose_headers=_EXPOSED)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        del response.headers["content-length"], response.headers["content-type"]
        refused = bytes(response.body).decode()
        body = APIError(400, f"{refused}; --cors-origin names those that may call.", code="cors_refused").body
        return Response(body, 400, response.headers, "application/json")
