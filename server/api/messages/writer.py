"""Writes a chat's reply as an Anthropic message, whole or as events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from server.api.chat.job import ChatJob
from server.api.chat.reply import ChatDelta, ChatReply
from server.api.errors import APIError
from server.api.generation import Generation
from server.api.messages.blocks import Event, MessageBlocks
from server.api.messages.translate import hides_thinking
from server.api.messages.wire import MessagesRequest
from server.api.wire import evictions
from server.text.reply import Reasoning


class MessagesWriter:
    """One message: its blocks come from the only choice of the chat."""

    def __init__(self, job: ChatJob, generation: Generation) -> None:
        body = job.extra
        assert isinstance(body, MessagesRequest)
        self._job = job
        self._asked = body.max_tokens
        self._hides_thinking = hides_thinking(body)
        self._reply = ChatReply(job, generation)
        self._blocks = MessageBlocks()

    @property
    def num_numbers(self) -> int:
        return 0

    async def whole(self) -> dict[str, Any]:
        ending: Event = {}
        async with aclosing(self._parts()) as events:
            async for event in events:
                if event["type"] == "message_delta":
                    ending = event
        return {**self._message(), **ending["delta"], "content": self._blocks.done, "usage": ending["usage"]}

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._parts()) as events:
            async for event in events:
                yield _write(event)

    def failure(self, error: APIError) -> bytes:
        return f"event: error\ndata: {error.messages_body(self._job.request_id).decode()}\n\n".encode()

    async def _parts(self) -> AsyncGenerator[Event, None]:
        """All events. The first waits for the first output: only then is it known what was cached."""
        started = False
        last: ChatDelta | None = None
        async with aclosing(self._reply.deltas()) as deltas:
            async for last in deltas:
                if not started:
                    started = True
                    yield {"type": "message_start", "message": self._message()}
                for part in last.parts:
                    if not (self._hides_thinking and isinstance(part, Reasoning)):
                        for event in self._blocks.feed(part):
                            yield event
        assert last is not None  # every choice has a last delta
        for event in self._blocks.finish():
            yield event
        yield {"type": "message_delta", "delta": self._ending(last), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._job.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._job.model_name,
            "content": [],
            "stop_details": None,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _ending(self, last: ChatDelta) -> dict[str, Any]:
        if last.finish_reason == "length":
            room = self._job.requests[0].max_tokens
            reason = "max_tokens" if room == self._asked else "model_context_window_exceeded"
        elif last.finish_reason == "tool_calls":
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(last.stop_reason, str) else "end_turn"
        sequence = last.stop_reason if reason == "stop_sequence" else None
        return {"stop_details": None, "stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Anthropic's `input_tokens` are those that were not read from the cache."""
        usage = self._reply.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            **evictions(usage),
        }


def _write(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
