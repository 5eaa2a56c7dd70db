"""What a chat model's output consists of: reasoning, content and tool calls, told apart as the text arrives.

The parts of a reply are the same however its text is cut into pieces, so a streamed answer and a whole one agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of one reply from 0; `id` is the model's own where its format has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of call `index`, a JSON object as text."""

    index: int
    text: str


Part: TypeAlias = Reasoning | Content | ToolCallStart | ToolCallArguments


class ReplyParser(Protocol):
    """Tells the parts of one reply apart. Text that may still turn out to be markup is held back."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The reply is over: what was held back is what it looks like. Broken markup becomes content."""
        ...
