"""The conversation of a chat request, checked, and as a template takes it.

Nothing is ever fetched: a part that points somewhere is refused, whatever it points at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.api.errors import invalid, show
from server.api.place import Place

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 1024
MAX_NAME = 256

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_ONLY = "this is a text model, which takes parts of type 'text'; nothing is fetched"

_NAME = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"type": "string", "enum": ["text"]},
        "text": {"type": "string"},
        "refusal": {"type": ["string", "null"]},
    },
}
_CALL = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": {"type": "string", "minLength": 1, "maxLength": MAX_NAME},
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME},
                "arguments": {"type": "string"},
            },
        },
    },
}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "enum": list(_ROLES)},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "minItems": 1, "items": _PART}]
            },
            "name": _NAME,
            "reasoning_content": {"type": ["string", "null"]},
            "reasoning": {"type": ["string", "null"]},
            "refusal": {"type": ["string", "null"]},
            "tool_call_id": _NAME,
            "tool_calls": {"type": ["array", "null"], "maxItems": MAX_TOOL_CALLS, "items": _CALL},
        },
    },
}


def check_messages(value: object) -> list[dict[str, Any]]:
    """The messages as a template takes them, the parts of a content joined to one string. Raises APIError 400."""
    place = Place(value, "messages")
    entries = place.entries()
    if not 0 < len(entries) <= MAX_MESSAGES:
        raise invalid("messages", f"'messages' must hold 1 to {MAX_MESSAGES} messages; got {len(entries)}.")
    messages = [_message(entry) for entry in entries]
    names: dict[str, str] = {}  # behind the ids of calls: some templates show an answer under its function's name
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def num_characters(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters of the contents; a prompt has at least as many."""
    return sum(len(message["content"]) for message in messages)


def _message(place: Place) -> dict[str, Any]:
    if place["role"].value == "function":
        raise place["role"].unsupported("'function' is of an older interface; use 'tool' with 'tool_call_id'")
    role = place["role"].one_of(_ROLES)
    message: dict[str, Any] = {"role": role}
    content = _content(place["content"], role)
    if not place["name"].absent:
        message["name"] = checked_name(place["name"])
    if role == "tool":
        message["tool_call_id"] = checked_name(place["tool_call_id"])
    if role == "assistant":
        message |= _assistant(place)
        if content is None and not place["refusal"].absent:
            content = place["refusal"].text()
    if content is None and "tool_calls" not in message:
        raise place["content"].must_be("a string or a list of text parts")
    message["content"] = content or ""
    return message


def _assistant(place: Place) -> dict[str, Any]:
    """What only the assistant's messages have."""
    if not place["function_call"].absent:
        raise place["function_call"].unsupported("this is of an older interface; use 'tool_calls'")
    if not place["audio"].absent:
        raise place["audio"].unsupported(_TEXT_ONLY)
    if place["prefix"].flag():
        raise place["prefix"].unsupported("use 'continue_final_message'")
    found: dict[str, Any] = {}
    for name in ("reasoning", "reasoning_content"):
        if not place[name].absent:
            found["reasoning_content"] = place[name].text()
    calls = [] if place["tool_calls"].absent else place["tool_calls"].entries()
    if len(calls) > MAX_TOOL_CALLS:
        raise place["tool_calls"].must_be(f"a list of up to {MAX_TOOL_CALLS} calls")
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(place: Place) -> dict[str, Any]:
    if not place["type"].absent:
        place["type"].one_of(["function"])
    function = place["function"]
    arguments = function["arguments"]
    return {
        "id": checked_name(place["id"]),
        "type": "function",
        "function": {
            "name": checked_name(function["name"]),
            "arguments": arguments.text() if isinstance(arguments.value, str) else arguments.mapping(),
        },
    }


def _content(place: Place, role: str) -> str | None:
    """Parts are joined without anything between them, so that ["a", "b"] makes the same prompt as "ab"."""
    if place.absent:
        return None
    if isinstance(place.value, list) and place.value:
        return "".join(_part(part, role) for part in place.entries())
    if not isinstance(place.value, str):
        raise place.must_be("a string or a list of text parts")
    return place.text()


def _part(place: Place, role: str) -> str:
    kind = place["type"].value
    if kind == "text":
        return place["text"].text()
    if kind == "refusal" and role == "assistant":
        return place["refusal"].text()
    if isinstance(kind, str):
        raise place.unsupported(f"parts of type {show(kind)} are not supported: {_TEXT_ONLY}")
    raise place["type"].must_be("'text'")


def checked_name(place: Place) -> str:
    """A name, or the id of a call. Raises APIError 400."""
    text = place.text()
    if not 0 < len(text) <= MAX_NAME:
        raise invalid(place.path, f"'{place.path}' must have 1 to {MAX_NAME} characters; got {len(text)}.")
    return text
