"""A chat's chunks put together to the answer they stand for, with the stream's own rules checked on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def joined(events: Sequence[Any]) -> dict[str, Any]:
    """The answer that the chunks of a complete stream (without [DONE]) make, in the form of a whole one."""
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        assert usage is None, "the usage comes last"
        if not event["choices"]:
            usage = event["usage"]
            continue
        (part,) = event["choices"]
        _add(choices, part)
    assert all(choice["finish_reason"] for choice in choices.values())
    for choice in choices.values():
        message = choice["message"]
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
    first = events[0]
    answer = {"id": first["id"], "created": first["created"], "model": first["model"], "object": "chat.completion"}
    answer["system_fingerprint"] = first["system_fingerprint"]
    return {**answer, "choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _add(choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    delta = part["delta"]
    index = part["index"]
    if index not in choices:
        assert delta == {"role": "assistant", "content": "", "refusal": None}
        choices[index] = {"index": index, "message": delta, "logprobs": None, "finish_reason": None}
        return
    choice = choices[index]
    assert choice["finish_reason"] is None, "nothing follows the finish reason"
    message = choice["message"]
    assert delta.keys() <= {"content", "reasoning_content", "tool_calls"}
    assert delta or part["finish_reason"]
    for name in ("content", "reasoning_content"):
        if name in delta:
            assert delta[name], "no empty piece"
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
        else:
            assert call.keys() == {"index", "function"}
            assert call["function"].keys() == {"arguments"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if part["logprobs"] is not None:
        choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
        choice["logprobs"]["content"] += part["logprobs"]["content"]
    if part["finish_reason"] is not None:
        choice["finish_reason"] = part["finish_reason"]
        choice["stop_reason"] = part["stop_reason"]
