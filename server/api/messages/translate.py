"""From the body of /v1/messages to that of a chat request.

A user's turn with tool results becomes a tool message for each and a user message for the text between them. Turns of
one role that follow each other are one turn, as at Anthropic, so that templates which want alternation are content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.api.chat.messages import checked_name
from server.api.messages.wire import CountTokensRequest, MessagesRequest
from server.api.place import Place
from server.api.wire import DecodingFields

_TEXT_ONLY = "this is a text model, which takes text blocks; nothing is fetched"
SWITCHES = ("enable_thinking", "thinking")
"""What templates call the variable that says whether to think."""

_BETWEEN_TURNS = "\n\n"
# What a tool result that says `is_error` begins with: chat has no other way to tell the model.
_ERROR = "Error: "


def to_chat(body: CountTokensRequest, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The chat body that asks for the same. Raises APIError 400 under the names of this route's fields."""
    chat = {name: raw[name] for name in DecodingFields.model_fields if name in raw}
    chat["messages"] = _messages(Place(body.system, "system"), Place(body.messages, "messages"))
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"], chat["add_generation_prompt"] = True, False
    kwargs = Place(body.chat_template_kwargs, "chat_template_kwargs")
    if body.thinking is not None:
        # By either name, whichever the template knows.
        thinking = dict.fromkeys(SWITCHES, _thinks(Place(body.thinking, "thinking")))
        chat["chat_template_kwargs"] = thinking if kwargs.absent else {**thinking, **kwargs.mapping()}
    else:
        chat["chat_template_kwargs"] = kwargs.value
    if body.tools is not None:
        chat["tools"] = [_tool(place) for place in Place(body.tools, "tools").entries()]
    if body.tool_choice is not None:
        choice = Place(body.tool_choice, "tool_choice")
        chat["tool_choice"] = _tool_choice(choice)
        chat["parallel_tool_calls"] = not choice["disable_parallel_tool_use"].flag()
    form = Place(body.output_format, "output_format")
    if body.output_config is not None:
        config = Place(body.output_config, "output_config")
        if not config["effort"].absent:
            chat["reasoning_effort"] = config["effort"].one_of(("low", "medium", "high", "xhigh", "max"))
        form = config["format"] if form.absent else form
    if not form.absent:
        form["type"].one_of(("json_schema",))
        schema = {"name": "output", "schema": form["schema"].mapping(), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.context_management is not None:
        _check_edits(Place(body.context_management, "context_management"))
    if isinstance(body, MessagesRequest):
        chat["max_completion_tokens"], chat["stop"] = body.max_tokens, body.stop_sequences
    return chat


def asks_to_think(body: CountTokensRequest) -> bool:
    return isinstance(body.thinking, dict) and body.thinking.get("type") != "disabled"


def hides_thinking(body: CountTokensRequest) -> bool:
    return isinstance(body.thinking, dict) and body.thinking.get("display") == "omitted"


def _messages(system: Place, turns: Place) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if not system.absent and (text := _text(system)):
        messages.append({"role": "system", "content": text})
    entries = turns.entries()
    if not entries:
        raise turns.must_be("a list of at least one message")
    called: set[str] = set()
    for turn in entries:
        role = turn["role"].one_of(("user", "assistant", "system"))
        content = turn["content"]
        blocks = [] if isinstance(content.value, str) else content.entries()
        if isinstance(content.value, str) or role == "system":
            _add(messages, {"role": role, "content": _text(content)})
        elif role == "assistant":
            called |= _assistant(messages, blocks)
        else:
            _user(messages, blocks, called)
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise entries[-1].must_be("the results of the tools that the assistant's turn before it uses")
    return messages


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append, or go on with the last one where both are turns of the same role."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    for name in ("content", "reasoning_content"):
        parts = [part for part in (last.get(name), message.get(name)) if part]
        if parts:
            last[name] = _BETWEEN_TURNS.join(parts)
    if message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _user(messages: list[dict[str, Any]], blocks: list[Place], called: set[str]) -> None:
    text: list[str] = []
    for block in blocks:
        kind = block["type"].text()
        if kind == "text":
            text.append(block["text"].text())
        elif kind == "tool_result":
            if text:
                _add(messages, {"role": "user", "content": "".join(text)})
                text = []
            use = block["tool_use_id"]
            if use.text() not in called:
                raise use.must_be("the 'id' of a 'tool_use' block before it")
            result = "" if block["content"].absent else _text(block["content"])
            prefix = _ERROR if block["is_error"].flag() else ""
            _add(messages, {"role": "tool", "tool_call_id": use.text(), "content": prefix + result})
        else:
            raise block.unsupported(f"blocks of type '{kind[:40]}' are not supported here: {_TEXT_ONLY}")
    if text or not blocks:
        _add(messages, {"role": "user", "content": "".join(text)})


def _assistant(messages: list[dict[str, Any]], blocks: list[Place]) -> set[str]:
    """Adds the turn; returns the ids of its calls."""
    text: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match kind := block["type"].text():
            case "text":
                text.append(block["text"].text())
            case "thinking":
                thinking.append(block["thinking"].text())
            case "tool_use":
                function = {"name": checked_name(block["name"]), "arguments": block["input"].mapping()}
                calls.append({"id": checked_name(block["id"]), "type": "function", "function": function})
            case "redacted_thinking":
                raise block.unsupported("this server cannot read it; leave the block out")
            case _:
                raise block.unsupported(f"blocks of type '{kind[:40]}' are not supported here: {_TEXT_ONLY}")
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(text)}
    if thinking:
        turn["reasoning_content"] = "\n".join(thinking)
    if calls:
        turn["tool_calls"] = calls
    _add(messages, turn)
    return {call["id"] for call in calls}


def _text(place: Place) -> str:
    """A string or text blocks."""
    if isinstance(place.value, str):
        return place.text()
    if not isinstance(place.value, list):
        raise place.must_be("a string or a list of text blocks")
    pieces: list[str] = []
    for block in place.entries():
        if block["type"].text() != "text":
            raise block.unsupported(f"only text blocks are supported here: {_TEXT_ONLY}")
        pieces.append(block["text"].text())
    return "".join(pieces)


def _thinks(thinking: Place) -> bool:
    kind = thinking["type"].one_of(("enabled", "adaptive", "disabled"))
    budget = thinking["budget_tokens"]
    if not budget.absent and (type(budget.value) is not int or budget.value < 1):
        raise budget.must_be("an integer of at least 1")
    if not thinking["display"].absent:
        thinking["display"].one_of(("summarized", "omitted"))
    return kind != "disabled"


def _tool(place: Place) -> dict[str, Any]:
    kind = place["type"]
    if kind.value not in (None, "custom"):
        raise kind.must_be("\"custom\" or absent, with an 'input_schema': this server runs no tools of its own")
    if place["defer_loading"].flag():
        raise place["defer_loading"].unsupported("all tools are shown to the model; leave out those it shall not see")
    function: dict[str, Any] = {"name": place["name"].text(), "parameters": place["input_schema"].mapping()}
    for name in ("description", "strict"):
        if not place[name].absent:
            function[name] = place[name].value
    return {"type": "function", "function": function}


def _tool_choice(choice: Place) -> object:
    match choice["type"].one_of(("auto", "any", "tool", "none")):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice["name"].text()}}
        case kind:
            return kind


def _check_edits(management: Place) -> None:
    """Clients send an edit that keeps all thinking, which asks for nothing."""
    for edit in [] if management["edits"].absent else management["edits"].entries():
        if edit["type"].value != "clear_thinking_20251015" or edit["keep"].value != "all":
            raise edit.unsupported("the conversation is not edited here; leave out what the model shall not see")
