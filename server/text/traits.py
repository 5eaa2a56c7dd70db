"""What a chat template can write, found by trying it: templates say it nowhere, and leave out what they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from server.text.jinja import TemplateFailed

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools. Raises TemplateFailed."""

_USER = {"role": "user", "content": "zqquestion"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "zqfunction",
        "description": "zqdescription",
        "parameters": {"type": "object", "properties": {"zqkey": {"type": "string"}}, "required": ["zqkey"]},
    },
}


@dataclass(frozen=True, slots=True)
class CallTraits:
    """How a template takes the calls of earlier turns.

    content: of a message that holds nothing but calls. as_text: whether arguments are JSON text, not an object.
    short_ids: whether ids must be nine letters or digits (Mistral).
    """

    content: str | None
    as_text: bool
    short_ids: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template can write.

    parts: whether it takes contents only as a list of parts. system: whether it takes a system message.
    tools: whether it shows the tools. calls: how it takes earlier calls and their results, None where it does not.
    """

    parts: bool
    system: bool
    tools: bool
    calls: CallTraits | None


def find_traits(render: Render) -> Traits:
    """Try a template out. A template that fails at everything has no traits; its failure shows when it is used."""

    def writes(messages: Sequence[Mapping[str, Any]], words: Sequence[str], tools: Any = None) -> str:
        try:
            text = render(as_parts(messages) if parts else messages, tools)
        except TemplateFailed:
            return ""
        return text if all(word in text for word in words) else ""

    parts = False
    if not writes([_USER], ["zqquestion"]):
        parts = True
        parts = bool(writes([_USER], ["zqquestion"]))
    system = bool(writes([{"role": "system", "content": "zqsystem"}, _USER], ["zqsystem", "zqquestion"]))
    tools = bool(writes([_USER], ["zqfunction", "zqkey"], [_TOOL]))
    calls = None
    for content, as_text, short in product((None, ""), (False, True), (False, True)):
        call_id = "zq1234567" if short else "call_zq1234567890abcdefghij"
        arguments = '{"zqkey": "zqvalue"}' if as_text else {"zqkey": "zqvalue"}
        function = {"name": "zqfunction", "arguments": arguments}
        conversation: list[Mapping[str, Any]] = [
            _USER,
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "name": "zqfunction", "content": "zqresult"},
        ]
        text = writes(conversation, ["zqfunction", "zqvalue", "zqresult"], [_TOOL] if tools else None)
        if text and "None" not in text and "'zqkey'" not in text and '\\"zqkey' not in text:
            calls = CallTraits(content, as_text, short)
            break
    return Traits(parts, system, tools, calls)


def as_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with their contents as lists of parts."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]
