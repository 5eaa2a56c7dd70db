"""The items of a response as they grow, and the events that tell of it: one machine for streamed and whole answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from server.api.chat.reply import ChatDelta
from server.api.responses.translate import seal
from server.text.reply import Content, Reasoning, ToolCallArguments, ToolCallStart

Status: TypeAlias = Literal["completed", "incomplete"]
Event: TypeAlias = dict[str, Any]
"""An event without its sequence number."""


class ResponseItems:
    """Turns the parts of a reply into items: each run of reasoning or of text is one, each call is one.

    stem: what the ids of the items end in before their index.
    sealed: whether reasoning items hold `encrypted_content`.
    scored: whether text has the log-probabilities of its tokens.
    done: the items, the last of which may still be open.
    """

    def __init__(self, stem: str, *, sealed: bool, scored: bool) -> None:
        self._stem = stem
        self._sealed = sealed
        self._scored = scored
        self._open: _Text | _Call | None = None
        self.done: list[dict[str, Any]] = []

    def feed(self, delta: ChatDelta) -> Iterator[Event]:
        scores: Sequence[Any] = delta.scores
        for part in delta.parts:
            match part:
                case Reasoning(text):
                    yield from self._open_text("reasoning")
                    yield from self._grow(text)
                case Content(text):
                    yield from self._open_text("message")
                    yield from self._grow(text, scores)
                    scores = ()
                case ToolCallStart():
                    yield from self._start(_Call(f"fc_{self._stem}_{len(self.done)}", part))
                case ToolCallArguments(_, text):
                    yield from self._grow(text)
        if scores and not delta.parts and isinstance(self._open, _Text):
            self._open.scores += scores  # of the token that ends the text, which has none

    def finish(self, status: Status) -> Iterator[Event]:
        """Nothing follows. A reply of no parts at all is a message without text."""
        if not self.done:
            yield from self._open_text("message")
        yield from self._close(status)

    def _open_text(self, kind: Literal["reasoning", "message"]) -> Iterator[Event]:
        if isinstance(self._open, _Text) and self._open.kind == kind:
            return
        prefix = "rs" if kind == "reasoning" else "msg"
        yield from self._start(_Text(kind, f"{prefix}_{self._stem}_{len(self.done)}", self._scored, self._sealed))

    def _start(self, opened: _Text | _Call) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = opened
        self.done.append(opened.item("in_progress", empty=True))
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self.done[-1]}
        yield from self._at(opened.opening())

    def _grow(self, text: str, scores: Sequence[Any] = ()) -> Iterator[Event]:
        assert self._open is not None
        yield from self._at([self._open.grow(text, scores)])

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is None:
            return
        closed, self._open = self._open, None
        yield from self._at(closed.closing())
        self.done[-1] = closed.item(status)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.done[-1]}

    @property
    def _index(self) -> int:
        return len(self.done) - 1

    def _at(self, events: Sequence[Event]) -> Iterator[Event]:
        for event in events:
            event["output_index"] = self._index
            yield event


class _Text:
    """An open item that holds one part of text: a message or the reasoning before it."""

    def __init__(self, kind: Literal["reasoning", "message"], item_id: str, scored: bool, sealed: bool) -> None:
        self.kind = kind
        self.scores: list[Any] = []
        self._id = item_id
        self._scored = scored
        self._sealed = sealed
        self._part_type = "reasoning_text" if kind == "reasoning" else "output_text"
        self._pieces: list[str] = []

    def item(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        content = [] if empty else [self._part()]
        item: dict[str, Any] = {"id": self._id, "type": self.kind, "status": status, "content": content}
        if self.kind == "message":
            item["role"] = "assistant"
        else:
            item["summary"] = []
            item["encrypted_content"] = seal("".join(self._pieces)) if self._sealed and not empty else None
        return item

    def _part(self) -> dict[str, Any]:
        text = "".join(self._pieces)
        if self.kind == "reasoning":
            return {"type": self._part_type, "text": text}
        return {"type": self._part_type, "text": text, "annotations": [], "logprobs": list(self.scores)}

    def _event(self, name: str, **fields: Any) -> Event:
        return {"type": f"response.{name}", "item_id": self._id, "content_index": 0, **fields}

    def opening(self) -> list[Event]:
        return [self._event("content_part.added", part=self._part())]

    def grow(self, text: str, scores: Sequence[Any]) -> Event:
        self._pieces.append(text)
        if self.kind == "reasoning":
            return self._event("reasoning_text.delta", delta=text)
        if self._scored:
            self.scores += scores
        return self._event("output_text.delta", delta=text, logprobs=list(scores) if self._scored else [])

    def closing(self) -> list[Event]:
        part = self._part()
        scores = {"logprobs": part["logprobs"]} if self.kind == "message" else {}
        return [
            self._event(f"{self._part_type}.done", text=part["text"], **scores),
            self._event("content_part.done", part=part),
        ]


class _Call:
    """An open call of a function."""

    def __init__(self, item_id: str, start: ToolCallStart) -> None:
        self._id = item_id
        self._start = start
        self._pieces: list[str] = []

    def item(self, status: str, *, empty: bool = False) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._start.id,
            "name": self._start.name,
            "arguments": "".join(self._pieces),
        }

    def opening(self) -> list[Event]:
        return []

    def grow(self, text: str, scores: Sequence[Any]) -> Event:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", "item_id": self._id, "delta": text}

    def closing(self) -> list[Event]:
        arguments = "".join(self._pieces)
        return [{"type": "response.function_call_arguments.done", "item_id": self._id, "arguments": arguments}]
