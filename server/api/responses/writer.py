"""Writes a chat's reply as a response, whole or as events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from server.api.chat.job import ChatJob
from server.api.chat.reply import ChatReply
from server.api.errors import APIError
from server.api.generation import Generation
from server.api.responses.items import Event, ResponseItems, Status
from server.api.responses.translate import LOGPROBS, SEALED_REASONING, includes
from server.api.responses.wire import ResponsesRequest
from server.api.wire import evictions


class ResponsesWriter:
    """One response: its items come from the only choice of the chat."""

    def __init__(self, job: ChatJob, generation: Generation) -> None:
        body = job.extra
        assert isinstance(body, ResponsesRequest)
        self._job = job
        self._body = body
        self._reply = ChatReply(job, generation)
        asked = includes(body)
        self._items = ResponseItems(job.request_id, sealed=SEALED_REASONING in asked, scored=LOGPROBS in asked)
        self._sequence = 0

    @property
    def num_numbers(self) -> int:
        if not self._job.body.logprobs:
            return 0
        return self._job.requests[0].max_tokens * (1 + (self._body.top_logprobs or 0))

    async def whole(self) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        async with aclosing(self._parts()) as events:
            async for event in events:
                answer = event.get("response", answer)
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._parts()) as events:
            async for event in events:
                yield self._write(event)

    def failure(self, error: APIError) -> bytes:
        """The response as failed, then the error, whose members clients look for in two places."""
        fault = json.loads(error.body)["error"]
        failed = self._response("failed", error={"code": "server_error", "message": error.message})
        return self._write({"type": "response.failed", "response": failed}) + self._write(
            {**fault, "type": "error", "error": fault}
        )

    def _write(self, event: Event) -> bytes:
        kind = event["type"]
        data = json.dumps({"type": kind, "sequence_number": self._sequence, **event})
        self._sequence += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    async def _parts(self) -> AsyncGenerator[Event, None]:
        """All events; the last one holds the response."""
        items = self._items
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}
        reason = None
        async with aclosing(self._reply.deltas()) as deltas:
            async for delta in deltas:
                for event in items.feed(delta):
                    yield event
                reason = delta.finish_reason or reason
        status: Status = "incomplete" if reason == "length" else "completed"
        for event in items.finish(status):
            yield event
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, incomplete_details=details, usage=self._usage())
        yield {"type": f"response.{status}", "response": response}

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        job, body = self._job, self._body
        params = job.requests[0].params
        return {
            "id": f"resp_{job.request_id}",
            "object": "response",
            "created_at": job.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": job.model_name,
            "output": self._items.done,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **fields,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reply.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
            **evictions(usage),
        }
