"""The tools of a chat request, and which of them the answer must use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from server.api.errors import invalid, show
from server.api.place import Place

MAX_TOOLS = 1024
_NAME = r"[A-Za-z0-9_.:/-]{1,128}"

TOOLS_SCHEMA: dict[str, Any] = {
    "type": ["array", "null"],
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["function"],
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": f"^{_NAME}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}
TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {"type": "null"},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"type": "string", "enum": ["function"]},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
    ]
}


@dataclass(frozen=True, slots=True)
class Named:
    """The one tool that must be called."""

    name: str


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | Named


def check_tools(value: object) -> list[dict[str, Any]]:
    """The tools as templates and grammars take them. Raises APIError 400."""
    if value is None:
        return []
    place = Place(value, "tools")
    entries = place.entries()
    if len(entries) > MAX_TOOLS:
        raise place.must_be(f"a list of up to {MAX_TOOLS} tools")
    tools = [_tool(entry) for entry in entries]
    taken: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in taken:
            raise invalid(f"tools[{index}].function.name", f"Two of the 'tools' have the name {show(name)}.")
        taken.add(name)
    return tools


def _tool(place: Place) -> dict[str, Any]:
    if not place["type"].absent:
        place["type"].one_of(["function"])
    function = place["function"]
    name = function["name"]
    if not isinstance(name.value, str) or not re.fullmatch(_NAME, name.value):
        raise name.must_be("1 to 128 letters, digits or any of _ - . : /")
    parameters, description, strict = function["parameters"], function["description"], function["strict"]
    checked: dict[str, Any] = {
        "name": name.value,
        "description": "" if description.absent else description.text(),
        "parameters": {"type": "object", "properties": {}} if parameters.absent else dict(parameters.mapping()),
    }
    if not strict.absent:
        checked["strict"] = strict.flag()
    return {"type": "function", "function": checked}


def check_tool_choice(value: object) -> ToolChoice | None:
    """Raises APIError 400."""
    if value is None:
        return None
    place = Place(value, "tool_choice")
    if isinstance(value, dict):
        place["type"].one_of(["function"])
        return Named(place["function"]["name"].text())
    if value == "none" or value == "auto" or value == "required":
        return value
    raise place.must_be('\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}')


def offered_tools(
    tools: Sequence[dict[str, Any]], choice: ToolChoice | None
) -> tuple[Sequence[dict[str, Any]], ToolChoice]:
    """The tools that the model is shown, and what it is to do with them. Raises APIError 400 where the two fields do
    not go together.
    """
    if not tools:
        if choice is None or choice in ("none", "auto"):
            return (), "none"
        raise invalid("tool_choice", "This 'tool_choice' needs 'tools', and there are none.")
    if isinstance(choice, Named) and choice.name not in [tool["function"]["name"] for tool in tools]:
        message = f"'tool_choice' names {show(choice.name)}, which is not among the 'tools'."
        raise invalid("tool_choice.function.name", message)
    return (() if choice == "none" else tools), choice or "auto"
