"""Writes a chat's reply as POST /v1/chat/completions answers: one body, or chunks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quote
from typing import Any

import server
from server.api.chat.job import ChatJob
from server.api.chat.reply import ChatDelta, ChatReply
from server.api.chat.wire import ChatBody, ChatChoiceBody, MessageBody, ScoreBody, ScoresBody, ToolCallBody
from server.api.errors import APIError
from server.api.generation import Generation
from server.api.sse import DONE, error_event, event
from server.text.reply import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

FINGERPRINT = f"sluice-{server.__version__}"


class ChatWriter:
    def __init__(self, job: ChatJob, generation: Generation) -> None:
        self._job = job
        self._reply = ChatReply(job, generation)

    @property
    def num_numbers(self) -> int:
        return self._job.num_numbers

    async def whole(self) -> ChatBody:
        job = self._job
        messages = [_Message() for _ in job.requests]
        async with aclosing(self._reply.deltas()) as deltas:
            async for delta in deltas:
                messages[delta.choice].add(delta)
        return {
            "id": f"chatcmpl-{job.request_id}",
            "object": "chat.completion",
            "created": job.created,
            "model": job.model_name,
            "system_fingerprint": FINGERPRINT,
            "choices": [message.body(index, bool(job.body.logprobs)) for index, message in enumerate(messages)],
            "usage": self._reply.usage(),
        }

    def failure(self, error: APIError) -> bytes:
        return error_event(error)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Each chunk is put together from prepared text: this runs once a token for every stream there is."""
        job = self._job
        options = job.body.stream_options
        asked = bool(options and options.include_usage)
        always = bool(options and options.continuous_usage_stats)
        scored = bool(job.body.logprobs)
        head = (
            f'{{"id":{quote(f"chatcmpl-{job.request_id}")},"object":"chat.completion.chunk","created":{job.created},'
            f'"model":{quote(job.model_name)},"system_fingerprint":{quote(FINGERPRINT)},"choices":['
        )
        tail = '],"usage":null}' if asked else "]}"
        silent = set(range(len(job.requests)))
        async with aclosing(self._reply.deltas()) as deltas:
            async for delta in deltas:
                choice = delta.choice
                if always:
                    tail = f'],"usage":{json.dumps(self._reply.usage())}}}'
                if choice in silent:
                    silent.remove(choice)
                    start = (
                        '"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
                    )
                    yield event(f'{head}{{"index":{choice},{start}{tail}'.encode())
                scores: Sequence[ScoreBody] = delta.scores
                if delta.parts:
                    logprobs = _logprobs(scores) if scored else "null"
                    middle = f'"delta":{_delta(delta.parts)},"logprobs":{logprobs},"finish_reason":null}}'
                    yield event(f'{head}{{"index":{choice},{middle}{tail}'.encode())
                    scores = ()
                if delta.finish_reason is not None:
                    logprobs = _logprobs(scores) if scored else "null"
                    reason, stop = quote(delta.finish_reason), json.dumps(delta.stop_reason)
                    end = f'"delta":{{}},"logprobs":{logprobs},"finish_reason":{reason},"stop_reason":{stop}}}'
                    yield event(f'{head}{{"index":{choice},{end}{tail}'.encode())
        if asked:
            yield event(f'{head}],"usage":{json.dumps(self._reply.usage())}}}'.encode())
        yield DONE


def _logprobs(scores: Sequence[ScoreBody]) -> str:
    return json.dumps({"content": list(scores), "refusal": None})


def _delta(parts: Sequence[Part]) -> str:
    """What the parts add to the message, as JSON. ASCII only: some clients take U+2028 for a line's end."""
    if len(parts) == 1 and type(parts[0]) is Content:
        return f'{{"content":{quote(parts[0].text)}}}'
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case ToolCallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ToolCallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return json.dumps(delta)


class _Message:
    """Collects the deltas of one choice."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        self._scores: list[ScoreBody] = []
        self._last: ChatDelta | None = None

    def add(self, delta: ChatDelta) -> None:
        for part in delta.parts:
            match part:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case ToolCallStart():
                    self._calls.append((part, []))
                case ToolCallArguments(index, text):
                    self._calls[index][1].append(text)
        self._scores += delta.scores
        self._last = delta

    def body(self, index: int, scored: bool) -> ChatChoiceBody:
        last = self._last
        assert last is not None
        assert last.finish_reason is not None
        scores: ScoresBody | None = {"content": self._scores, "refusal": None} if scored else None
        return {
            "index": index,
            "message": self._message(),
            "logprobs": scores,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _message(self) -> MessageBody:
        content = "".join(self._content)
        message: MessageBody = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [_call(start, arguments) for start, arguments in self._calls]
        return message


def _call(start: ToolCallStart, arguments: Sequence[str]) -> ToolCallBody:
    assert start.id is not None
    function = {"name": start.name, "arguments": "".join(arguments)}
    return {
        "id": start.id,
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }
