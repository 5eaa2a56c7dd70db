"""Reads one streamed completion into a `Record`, and decides whether it counts.

A stream is good only if it was answered with 200, every event was well formed, none carried an error, some choice named
a `finish_reason`, `[DONE]` came, and the body ended as its framing promised. Anything else is a failure with a reason.
"""

from __future__ import annotations

import json
from typing import Any

from server.bench.http1 import EventParser, ProtocolError, ResponseParser
from server.bench.record import Record

ERROR_BODY = 4096  # bytes of an error body worth keeping


class CompletionStream:
    """Feed it the bytes of the response, head and body, with the time each read returned.

    done_event: whether the stream must end with `[DONE]`; without it a `finish_reason` and whole framing do.
    """

    def __init__(self, record: Record, done_event: bool = True) -> None:
        self.record = record
        self._response = ResponseParser()
        self._body = CompletionBody(record, done_event)
        self._error_body = b""

    @property
    def closed(self) -> bool:
        """Whether nothing more of interest can come."""
        return self._response.complete or (self.record.failure is not None and self._response.status == 200)

    def feed(self, data: bytes, now: float) -> None:
        """Account for bytes that were read at `now`."""
        try:
            body = self._response.feed(data)
        except ProtocolError as error:
            self.record.fail(str(error))
            return
        if self._response.status is None:
            return
        self.record.status = self._response.status
        if self.record.status != 200:
            self._error_body += body[: ERROR_BODY - len(self._error_body)]
            return
        self._body.feed(body, now)

    def finish(self, now: float) -> None:
        """The response is over at `now`: complete, cut, or given up."""
        record = self.record
        record.ended = now
        whole = self._response.feed_eof()
        if record.status is None:
            record.fail("connection closed before a response")
        elif record.status != 200:
            record.fail(f"HTTP {record.status}: {error_message(self._error_body)}")
        else:
            self._body.finish(whole)


class CompletionBody:
    """The events of a response that was answered with 200; feed it the body, freed of its framing.

    texts: the pieces of the answer in order, without the reasoning before it.
    """

    def __init__(self, record: Record, done_event: bool = True) -> None:
        self.record = record
        self._done_event = done_event
        self.texts: list[str] = []
        self._events = EventParser()
        self._done = False

    def feed(self, body: bytes, now: float) -> None:
        """Account for a piece of the body that was read at `now`."""
        for event in self._events.feed(body):
            self._event(event, now)

    def finish(self, whole: bool) -> None:
        """Nothing more comes; `whole` is whether the body ended as its framing promised."""
        record = self.record
        if self._done_event and not self._done:
            record.fail("stream ended without [DONE]" if whole else "stream cut before its end")
        elif record.finish_reason is None:
            record.fail("stream ended without a finish_reason")
        elif not whole:
            record.fail("stream cut after [DONE]" if self._done else "stream cut before its end")

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            chunk = json.loads(data.decode())
        except ValueError:
            self.record.fail(f"event is not JSON: {data[:80]!r}")
            return
        if not isinstance(chunk, dict):
            self.record.fail(f"event is not an object: {data[:80]!r}")
        elif chunk.get("error"):
            self.record.fail(f"error event: {_message(chunk['error'])}")
        elif self._done:
            self.record.fail("event after [DONE]")
        else:
            try:
                self._chunk(chunk, now)
            except (AttributeError, TypeError):
                self.record.fail(f"event is not a completion: {data[:80]!r}")

    def _chunk(self, chunk: dict[str, Any], now: float) -> None:
        record = self.record
        usage = chunk.get("usage") or {}
        total = _number(usage, "completion_tokens")
        for choice in chunk.get("choices") or ():
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            text = _answer(choice)
            if text:
                self.texts.append(text)
            if text or _has_reasoning(choice):
                record.arrivals.append(now)
                record.totals.append(total)
        if usage:
            read_usage(usage, record)


def read_usage(usage: dict[str, Any], record: Record) -> None:
    """Raises TypeError or AttributeError for what is no usage."""
    record.prompt_tokens = _number(usage, "prompt_tokens")
    record.completion_tokens = _number(usage, "completion_tokens")
    record.cached_tokens = _number(usage.get("prompt_tokens_details") or {}, "cached_tokens")


def _number(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{name} is not a whole number")
    return value


def _answer(choice: dict[str, Any]) -> str:
    """The text of a choice of /completions or /chat/completions. Raises TypeError for what is no text."""
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    if not isinstance(text, str):
        raise TypeError("the text is not a string")
    return text


def _has_reasoning(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(delta.get("reasoning_content") or delta.get("reasoning"))


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def error_message(body: bytes) -> str:
    """The words of an OpenAI error body, or the start of whatever it is instead."""
    text = body.decode("utf-8", "replace").strip()
    try:
        parsed = json.loads(text)
    except ValueError:
        return text[:200] or "empty body"
    if isinstance(parsed, dict):
        return _message(parsed.get("error") or parsed.get("detail") or parsed)[:300]
    return text[:200]
