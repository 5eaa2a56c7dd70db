"""The content blocks of a message as they grow, and the events that tell of it: the same, streamed or whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from pydantic_core import from_json

from server.text.reply import Content, Part, Reasoning, ToolCallArguments, ToolCallStart

Event: TypeAlias = dict[str, Any]
_Kind: TypeAlias = Literal["thinking", "text", "tool_use"]


class MessageBlocks:
    """Each run of thinking or of text is one block, each call is one.

    done: the blocks that are complete.
    """

    def __init__(self) -> None:
        self._kind: _Kind | None = None
        self._block: dict[str, Any] = {}
        self._pieces: list[str] = []
        self.done: list[dict[str, Any]] = []

    def feed(self, part: Part) -> Iterator[Event]:
        match part:
            case Reasoning(text):
                if self._kind != "thinking":
                    yield from self._start("thinking", {"thinking": "", "signature": ""})
                yield self._grow(text, "thinking_delta", "thinking")
            case Content(text):
                if self._kind != "text":
                    yield from self._start("text", {"text": ""})
                yield self._grow(text, "text_delta", "text")
            case ToolCallStart():
                yield from self._start("tool_use", {"id": part.id, "name": part.name, "input": {}})
            case ToolCallArguments(_, text):
                yield self._grow(text, "input_json_delta", "partial_json")

    def finish(self) -> Iterator[Event]:
        """Close the open block, if there is one."""
        if self._kind is None:
            return
        index = len(self.done)
        text = "".join(self._pieces)
        match self._kind:
            case "thinking":
                signature = _signature(text)
                delta = {"type": "signature_delta", "signature": signature}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
                self._block.update(thinking=text, signature=signature)
            case "text":
                self._block["text"] = text
            case "tool_use":
                self._block["input"] = parse_input(text)
        yield {"type": "content_block_stop", "index": index}
        self.done.append(self._block)
        self._kind = None

    def _start(self, kind: _Kind, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self.finish()
        self._kind = kind
        self._block = {"type": kind, **fields}
        self._pieces = []
        yield {"type": "content_block_start", "index": len(self.done), "content_block": dict(self._block)}

    def _grow(self, text: str, kind: str, field: str) -> Event:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.done), "delta": {"type": kind, field: text}}


def parse_input(arguments: str) -> dict[str, Any]:
    """The object that the arguments of a call are. Of one that was cut: the members that are complete, which is what
    Anthropic's own clients make of a stream that breaks off."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _signature(thinking: str) -> str:
    """Clients send thinking back only with a signature; this one says nothing and is not checked."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()
