"""The body of a request: read whole within a limit, then JSON as RFC 8259 has it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import Request

from server.api.errors import APIError, ClientGone, invalid, show
from server.api.service import service_of

MOST_SILENCE_SECONDS = 30.0
# Bodies are held while they arrive, which a client may draw out. Together they may be so many times the limit of one.
_MOST_BODIES = 32
# A body over the limit is read on and dropped up to so many times the limit: a client that is still sending would see
# its connection reset instead of the answer.
_MOST_DROPPED = 8


async def read_body(request: Request) -> bytes:
    """The body of a request that declares JSON.

    Raises APIError 415, 413, 429 or 408, and ClientGone if the connection closes before the body is complete.
    """
    service = service_of(request)
    limit = service.settings.max_body_size
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        got = show(content_type) if content_type else "none"
        raise APIError(
            415, f"The content type must be application/json; got {got}. Send 'Content-Type: application/json'."
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise APIError(415, f"A body must not be compressed; got content encoding {show(encoding)}.")
    chunks: list[bytes] = []
    size = held = 0
    too_many = False
    try:
        async for chunk in _chunks(request):
            size += len(chunk)
            too_many = too_many or service.arriving_bytes + len(chunk) > _MOST_BODIES * limit
            if size <= limit and not too_many:
                chunks.append(chunk)
                service.arriving_bytes += len(chunk)
                held += len(chunk)
            else:
                chunks.clear()
                service.arriving_bytes -= held
                held = 0
            if size > _MOST_DROPPED * limit:
                break
    finally:
        service.arriving_bytes -= held
    if size > limit:
        raise APIError(
            413,
            f"The body is larger than the {limit} bytes a request may have (--max-body-size).",
            code="body_too_large",
            headers={"connection": "close"},
        )
    if too_many:
        raise APIError(
            429,
            f"Bodies of {_MOST_BODIES * limit} bytes, {_MOST_BODIES} times --max-body-size, are arriving already.",
            code="queue_full",
            headers={"retry-after": "1"},
            reason="queue_full",
        )
    return b"".join(chunks)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    """Raises APIError 408 and ClientGone."""
    more = True
    while more:
        try:
            async with asyncio.timeout(MOST_SILENCE_SECONDS):
                message = await request.receive()
        except TimeoutError:
            raise APIError(
                408,
                f"The body did not go on for {MOST_SILENCE_SECONDS:g} seconds.",
                code="body_timeout",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        more = message.get("more_body", False)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; of duplicate keys the last counts. Raises APIError 400 for anything else."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError:
        raise invalid(None, "The body is nested too deeply.", "invalid_json") from None
    except UnicodeDecodeError as error:
        raise invalid(None, f"The body is not UTF-8 (at byte {error.start}).", "invalid_json") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise invalid(None, f"The body is not valid JSON: {error.msg} ({where}).", "invalid_json") from None
    except ValueError as error:  # an integer of thousands of digits, or NaN
        raise invalid(None, f"The body is not valid JSON: {error}.", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"The body must be a JSON object; got {show(value)}.", "invalid_json")
    return value


def _finite(text: str) -> float:
    """1e999 would be infinity, which no answer that repeats it could spell."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{show(text)} is too large for a number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
