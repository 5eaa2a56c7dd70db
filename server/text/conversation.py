"""Messages in OpenAI's form as a given chat template takes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.text.traits import CallTraits, Traits, as_parts

if TYPE_CHECKING:
    from server.text.formats.syntaxes import Syntax

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def adapted(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, traits: Traits, syntax: Syntax
) -> list[Mapping[str, Any]]:
    """The messages for a template with `traits`.

    Where it shows no tools, they are described in the system message, or before the first one of the user; where it
    takes no calls, they and their results are written as the model would write and read them.
    """
    adapted = [_cleaned(message) for message in messages]
    if traits.calls is None:
        adapted = _calls_as_text(adapted, syntax)
    else:
        adapted = [_calls_as_taken(message, traits.calls) for message in adapted]
    if tools and not traits.tools:
        adapted = _with_instructions(adapted, instructions(tools, syntax), traits.system)
    return as_parts(adapted) if traits.parts else list(adapted)


def instructions(tools: Sequence[Mapping[str, Any]], syntax: Syntax) -> str:
    """What the model is told about the functions where its template tells it nothing."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = syntax.write([("function-name", '{"argument-name": "value"}')])
    return (
        "You may call one or more functions to assist with the user query. These functions are available, one JSON "
        f"object per line:\n<tools>\n{schemas}\n</tools>\n\n"
        "To call a function, answer with its name and a JSON object of its arguments, exactly in this form:\n"
        f"{example}\n\nIf no function fits, answer in words."
    )


def _cleaned(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null, of which templates make words or errors, and with reasoning under both its names."""
    cleaned = {key: value for key, value in message.items() if value is not None}
    if not cleaned.get("tool_calls"):
        cleaned.pop("tool_calls", None)
        cleaned.setdefault("content", "")
    if "reasoning_content" in cleaned:
        cleaned.setdefault("thinking", cleaned["reasoning_content"])
    return cleaned


def _calls_as_taken(message: dict[str, Any], traits: CallTraits) -> dict[str, Any]:
    taken = dict(message)
    if "tool_calls" in taken:
        taken["content"] = taken.get("content") or traits.content
        taken["tool_calls"] = [_call(call, traits) for call in taken["tool_calls"]]
    if traits.short_ids and "tool_call_id" in taken:
        taken["tool_call_id"] = short_id(taken["tool_call_id"])
    return taken


def _call(call: Mapping[str, Any], traits: CallTraits) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if traits.as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not traits.as_text and isinstance(arguments, str):
        function["arguments"] = _object(arguments)
    taken = {**call, "type": "function", "function": function}
    if traits.short_ids and "id" in taken:
        taken["id"] = short_id(taken["id"])
    return taken


def _object(arguments: str) -> Any:
    """Arguments as the object their text holds; text that holds none, a broken call sent back, stays as it is."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def short_id(call_id: str) -> str:
    """Nine letters or digits for any id, the same for the same one."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()[:8])
    return "".join(_ALPHABET[number // 36**place % 36] for place in range(9))


def _calls_as_text(messages: Sequence[dict[str, Any]], syntax: Syntax) -> list[dict[str, Any]]:
    """Calls as content of the assistant, results as content of the user; results in a row share one message."""
    written: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        if message.get("role") == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                written[-1]["content"] += "\n" + result
            else:
                written.append({"role": "user", "content": result})
            after_result = True
            continue
        after_result = False
        if "tool_calls" in message:
            calls = syntax.write([_name_and_text(call["function"]) for call in message["tool_calls"]])
            content = message.get("content")
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = f"{content}\n{calls}" if content else calls
        written.append(message)
    return written


def _name_and_text(function: Mapping[str, Any]) -> tuple[str, str]:
    arguments = function["arguments"]
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_instructions(messages: Sequence[dict[str, Any]], text: str, takes_system: bool) -> list[dict[str, Any]]:
    told = list(messages)
    if told and told[0].get("role") == "system":
        told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{text}".strip()}
    elif takes_system:
        told.insert(0, {"role": "system", "content": text})
    else:
        first = next((i for i, message in enumerate(told) if message.get("role") == "user"), None)
        if first is None:
            told.insert(0, {"role": "user", "content": text})
        else:
            told[first] = {**told[first], "content": f"{text}\n\n{told[first]['content']}"}
    return told
