"""From the body of /v1/responses to that of a chat request.

The items of one turn of the assistant (its reasoning, its message, its calls) become one chat message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from server.api.chat.messages import checked_name
from server.api.errors import invalid
from server.api.place import Place
from server.api.responses.wire import STATELESS, ResponsesRequest
from server.api.wire import DecodingFields

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"

_TEXT_ONLY = "this is a text model, which takes text parts; nothing is fetched"
_NO_SUMMARY = "reasoning is given whole, as the item's 'content'; summaries are not made"
# What asks for something from OpenAI's own tools, none of which can have run here.
_HARMLESS_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_SEAL = "sluice:"
_MOST_NESTING = 200


def to_chat(body: ResponsesRequest, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The chat body that asks for the same. Raises APIError 400 under the names of this route's fields."""
    chat = {name: raw[name] for name in DecodingFields.model_fields if name in raw}
    for name in ("text", "tools", "tool_choice"):  # which the answer repeats
        Place(getattr(body, name), name).check_nesting(_MOST_NESTING)
    chat["messages"] = _messages(body.instructions, Place(body.input, "input"))
    chat["max_completion_tokens"] = body.max_output_tokens
    _check_stream_options(body)
    chat["stop"] = body.stop
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    if body.tools is not None:
        chat["tools"] = [_tool(place) for place in Place(body.tools, "tools").entries()]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(Place(body.tool_choice, "tool_choice"))
    if body.text is not None:
        chat["response_format"] = _response_format(Place(body.text, "text"))
    if body.reasoning is not None:
        chat["reasoning_effort"] = _effort(Place(body.reasoning, "reasoning"))
    if LOGPROBS in includes(body):
        chat["logprobs"] = True
        chat["top_logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs", f"'top_logprobs' needs 'include': [\"{LOGPROBS}\"].")
    check_metadata(body)
    return chat


def includes(body: ResponsesRequest) -> set[str]:
    """What the answer shall hold beside the usual."""
    if body.include is None:
        return set()
    known = {LOGPROBS, SEALED_REASONING, *_HARMLESS_INCLUDES}
    return {place.one_of(sorted(known)) for place in Place(body.include, "include").entries()}


def check_metadata(body: ResponsesRequest) -> None:
    """OpenAI's limits: 16 pairs, keys of 64 and values of 512 characters."""
    metadata = Place(body.metadata, "metadata")
    if metadata.absent:
        return
    if len(metadata.mapping()) > 16:
        raise metadata.must_be("an object of up to 16 pairs")
    for key in metadata.mapping():
        if len(Place(key, "metadata").text()) > 64 or len(metadata[key].text()) > 512:
            raise metadata.must_be("an object with keys of up to 64 and values of up to 512 characters")


def _check_stream_options(body: ResponsesRequest) -> None:
    """A stream of responses has its usage always, at its end."""
    if body.stream_options is None:
        return
    if not body.stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.")
    if body.stream_options.continuous_usage_stats:
        place = Place(True, "stream_options.continuous_usage_stats")
        raise place.unsupported("usage comes with the last event")


def seal(reasoning: str) -> str:
    """Reasoning as an opaque `encrypted_content`, for clients that send only that back. It hides nothing."""
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def _unseal(place: Place) -> str:
    sealed = place.text()
    try:
        if sealed.startswith(_SEAL):
            return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise place.unsupported("it was not made by this server, which cannot read it; leave the item out")


def _messages(instructions: str | None, source: Place) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(source.value, str):
        return [*messages, {"role": "user", "content": source.text()}]
    items = source.entries() if isinstance(source.value, list) else []
    if not items:
        raise source.must_be("a string or a list of at least one item")
    calls: set[str] = set()
    for item in items:
        kind = "message" if item["type"].absent else item["type"].text()
        match kind:
            case "message":
                role = item["role"].one_of(("user", "assistant", "system", "developer"))
                content = _content(item["content"])
                if role == "assistant":
                    _turn(messages, ("content", "tool_calls"))["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            case "reasoning":
                reasoning = _reasoning(item)
                if reasoning:
                    _turn(messages, ("reasoning_content", "content", "tool_calls"))["reasoning_content"] = reasoning
            case "function_call":
                call = _call(item)
                calls.add(call["id"])
                _turn(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                call_id = item["call_id"].text()
                if call_id not in calls:
                    raise item["call_id"].must_be("the 'call_id' of a 'function_call' before it")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(item["output"])})
            case "item_reference":
                raise item.unsupported(STATELESS)
            case _:
                raise item["type"].must_be(
                    "one of message, reasoning, function_call and function_call_output: tools run at the client"
                )
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # an answer that was cut while it was thought about
    return messages


def _turn(messages: list[dict[str, Any]], closed_by: tuple[str, ...] = ()) -> dict[str, Any]:
    """The assistant's turn that is being put together, a new one if it has one of `closed_by`."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in closed_by):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _content(place: Place) -> str:
    if isinstance(place.value, str):
        return place.text()
    if not isinstance(place.value, list):
        raise place.must_be("a string or a list of text parts")
    return "".join(_part(part) for part in place.entries())


def _part(part: Place) -> str:
    match kind := part["type"].text():
        case "input_text" | "output_text":
            return part["text"].text()
        case "refusal":
            return part["refusal"].text()
        case "input_image" | "input_file" | "input_audio":
            raise part.unsupported(f"'{kind}' is not supported: {_TEXT_ONLY}")
    raise part["type"].must_be('"input_text" or "output_text"')


def _reasoning(item: Place) -> str:
    """The thoughts as they were, else their summary."""
    if item["content"].value:
        return "".join(part["text"].text() for part in item["content"].entries())
    if not item["encrypted_content"].absent:
        return _unseal(item["encrypted_content"])
    return "" if item["summary"].absent else "\n".join(part["text"].text() for part in item["summary"].entries())


def _call(item: Place) -> dict[str, Any]:
    return {
        "id": checked_name(item["call_id"]),
        "type": "function",
        "function": {"name": checked_name(item["name"]), "arguments": item["arguments"].text()},
    }


def _tool(place: Place) -> dict[str, Any]:
    kind = place["type"].text()
    if kind != "function":
        raise place["type"].must_be(
            "\"function\": this server has no tools of its own, and 'custom' ones have no schema"
        )
    function = {
        name: place[name].value for name in ("name", "description", "parameters", "strict") if not place[name].absent
    }
    return {"type": "function", "function": function}


def _tool_choice(place: Place) -> object:
    if isinstance(place.value, str):
        return place.one_of(("none", "auto", "required"))
    kind = place["type"].text()
    if kind != "function":
        raise place["type"].must_be("\"function\", with a 'name'")
    return {"type": "function", "function": {"name": place["name"].text()}}


def _response_format(text: Place) -> object:
    if text["verbosity"].value not in (None, "medium"):
        raise text["verbosity"].unsupported("say in 'instructions' how long the answer shall be")
    form = text["format"]
    if form.absent:
        return None
    kind = form["type"].one_of(("text", "json_object", "json_schema"))
    if kind != "json_schema":
        return {"type": kind}
    named = {name: form[name].value for name in ("name", "description", "schema", "strict") if not form[name].absent}
    return {"type": kind, "json_schema": named}


def _effort(reasoning: Place) -> object:
    for name, neutral in (("summary", "auto"), ("generate_summary", "auto")):
        if reasoning[name].value not in (None, neutral):
            raise reasoning[name].unsupported(_NO_SUMMARY)
    if reasoning["context"].value not in (None, "auto"):
        raise reasoning["context"].unsupported("the model's template decides which reasoning it shows again")
    if reasoning["mode"].value not in (None, "standard"):
        raise reasoning["mode"].unsupported("there is one mode, 'standard'")
    return None if reasoning["effort"].absent else reasoning["effort"].text()
