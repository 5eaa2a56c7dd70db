"""Refusals and failures, in the shape OpenAI clients parse: `{"error": {"message", "type", "param", "code"}}`.

Under /v1/messages the same object has what Anthropic's clients look for, too: `"type": "error"` and the request's id
beside it, and in it a type of their vocabulary.

A body is a few hundred bytes, and at most 4 KB: what a client sent is quoted only in short form (`show`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from typing_extensions import TypedDict

from server.generation import (
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    GrammarFailed,
    Phase,
    QueueFull,
    QueueTimeout,
    RequestTooLong,
)

if TYPE_CHECKING:
    from server.reports import RejectReason

MESSAGES_PATH = "/v1/messages"

# In bytes, as they stand in the body.
_LONGEST_MESSAGE = 2400
_LONGEST_PARAM = 400
_TYPES = {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_RETRY_AFTER = {Phase.LOADING: 5, Phase.DRAINING: 1, Phase.DEAD: 30}


class ErrorObject(TypedDict):
    """`param` names the field at fault; `code` is what programs tell errors by."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    error: ErrorObject


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": f"{words}; the body says what and why."}
    for status, words in (("4XX", "Refused"), ("5XX", "Failed, or not ready"))
}
"""What every route may answer beside success, as its OpenAPI document says it."""


class APIError(Exception):
    """An answer other than success. `param` names the field at fault, `reason` labels the metric of refusals.

    code: what programs tell errors by; without one, the name of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: RejectReason = "invalid",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _bounded(message, _LONGEST_MESSAGE)
        self.param = None if param is None else _bounded(param, _LONGEST_PARAM)
        self.code = code or HTTPStatus(status).name.lower()
        self.headers = headers
        self.reason: RejectReason = reason

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return json.dumps({"error": self._error(kind)}).encode()

    def messages_body(self, request_id: str) -> bytes:
        """The body for clients of Anthropic's interface; others can still read it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return json.dumps({"type": "error", "error": self._error(kind), "request_id": request_id}).encode()

    def _error(self, kind: str) -> ErrorObject:
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    def response(self, path: str, request_id: str) -> Response:
        """The answer to a request for `path`, in the shape its clients expect."""
        body = self.messages_body(request_id) if is_messages(path) else self.body
        return Response(body, self.status, self.headers, "application/json")


def _bounded(text: str, most: int) -> str:
    """`text`, cut where its JSON would have more than `most` bytes."""
    whole = text
    while (size := len(json.dumps(text))) > most:
        text = text[: len(text) * (most - 5) // size]
    return text if text is whole else text + "..."


def is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def invalid(param: str | None, message: str, code: str = "invalid_value") -> APIError:
    """400: the client can mend it."""
    return APIError(400, message, param=param, code=code)


def unavailable(phase: Phase, detail: str) -> APIError:
    """503: the server cannot generate in this phase of its life."""
    words = {
        Phase.LOADING: f"The model is still loading{f' ({detail})' if detail else ''}; try again shortly.",
        Phase.DRAINING: "The server is shutting down and takes no new requests; try another one.",
        Phase.DEAD: f"The engine has failed{f' ({detail})' if detail else ''}; the server must be restarted.",
    }
    headers = {"retry-after": str(_RETRY_AFTER[phase])}
    reason: dict[Phase, RejectReason] = {
        Phase.LOADING: "loading",
        Phase.DRAINING: "draining",
        Phase.DEAD: "dead",
    }
    return APIError(503, words[phase], code=f"engine_{phase.value}", headers=headers, reason=reason[phase])


def refused(error: EngineError) -> APIError:
    """What a refusal of `submit` is over HTTP."""
    match error:
        case QueueFull():
            return APIError(
                429,
                str(error),
                code=error.reason,
                headers={"retry-after": str(error.retry_after)},
                reason=error.reason,
            )
        case BodyTooLarge():
            return APIError(400, str(error), param="prompt", code="too_many_prompt_tokens", reason="too_long")
        case QueueTimeout():
            headers = {"retry-after": str(error.retry_after)}
            return APIError(503, str(error), code="queue_timeout", headers=headers)
        case DeadlineExceeded():
            # A retry would take as long, but OpenAI's clients try twice more unless told.
            return APIError(504, str(error), code="deadline_exceeded", headers={"x-should-retry": "false"})
        case RequestTooLong():
            return too_long(str(error))
        case GrammarFailed():  # a matter of the request's own, which would fail again
            return APIError(400, f"The answer could not be finished: {error}.", code="grammar_failed")
        case EngineUnavailable():
            return unavailable(error.phase, str(error))
    return APIError(500, str(error), code="generation_failed")


def too_long(message: str, param: str = "prompt") -> APIError:
    """400: `message` says how long the prompt is and may be. litellm and langchain know it by its first five words."""
    return APIError(
        400, f"The prompt is too long: {message}", param=param, code="context_length_exceeded", reason="too_long"
    )


def internal_error() -> APIError:
    """A fault of our own. The log has the details; the client has no use for them."""
    return APIError(500, "The server failed on this request; its log says why.", code="internal_error")


def show(value: object) -> str:
    """A client's value as it may stand in a message: plain ASCII, a few dozen characters at most."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            short = value if len(value) <= 60 else value[:57] + "..."
            return json.dumps(short)[:120]
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} fields"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


async def on_api_error(request: Request, error: Exception) -> Response:
    """Its code goes into the log, its message does not: that one quotes the client."""
    assert isinstance(error, APIError)
    exchange = request.state.exchange
    exchange.notes.update(error=error.code, param=error.param)
    return error.response(request.url.path, exchange.request_id)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown routes (404) and methods (405)."""
    assert isinstance(error, HTTPException)
    path = show(request.url.path)
    if error.status_code == 404:
        message = f"There is no route {path}; /openapi.json lists those there are."
        refusal = APIError(404, message, code="unknown_route")
    elif error.status_code == 405:
        allowed = ", ".join(_methods(request))
        message = f"{path} does not take {show(request.method)}, only {allowed}."
        refusal = APIError(405, message, headers={"allow": allowed})
    else:
        refusal = APIError(error.status_code, str(error.detail), headers=error.headers)
    return await on_api_error(request, refusal)


def _methods(request: Request) -> list[str]:
    """What the path takes. Starlette names the methods of the first route that has the path, of several or not.

    A path of its own keeps to its own methods, though a route with a parameter may have it too.
    """
    own = request.app.openapi()["paths"].get(request.url.path)
    if own is not None:
        return sorted(method.upper() for method in own)
    return [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


async def on_unfit_parameter(request: Request, error: Exception) -> Response:
    """A part of the path or the query that is not what its route declares."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    where, name = (str(part) for part in fault["loc"][:2])
    return await on_api_error(request, invalid(name, f"{show(name)} in the {where}: {fault['msg']}."))


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what logs and metrics call it."""
    return Response(status_code=499)
