"""The body of a request to /v1/messages, and its fields that are refused.

What lies deeper than one level (`messages`, `tools`, ...) is checked by the translation, which walks it anyway.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from server.api.parameters import COMMON, Unsupported
from server.api.place import Place
from server.api.wire import MAX_STOP_LENGTH, MAX_STOP_STRINGS, DecodingFields, members

_STRUCTURE = "use 'output_config.format'"


# Of all kinds of blocks. Prefixes are cached wherever clients mark them or not.
_BLOCK_MEMBERS = members(
    "type", "text", "thinking", "signature", "id", "name", "input", "tool_use_id", "is_error", "cache_control"
)
_BLOCK = {
    "type": "object",
    "required": ["type"],
    "properties": {
        **_BLOCK_MEMBERS,
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"properties": _BLOCK_MEMBERS}}]},
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]},
    },
}
_TEXT_BLOCK = {
    "type": "object",
    "required": ["type", "text"],
    "properties": members("type", "text", "cache_control"),
}
_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_TOOL = {
    "type": "object",
    "required": ["name", "input_schema"],
    "properties": members("type", "name", "description", "input_schema", "strict", "cache_control"),
}
_THINKING = {
    "type": "object",
    "required": ["type"],
    "properties": members("type", "display"),  # and a budget, which is named as ignored
}
_CHOICE = {
    "type": "object",
    "required": ["type"],
    "properties": members("type", "name", "disable_parallel_tool_use"),
}
_FORMAT = {"type": "object", "required": ["type"], "properties": members("type", "schema", "name")}
_CONFIG = {"type": "object", "properties": {"effort": {}, "format": {"anyOf": [_FORMAT, {"type": "null"}]}}}
_STRINGS = {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS}

Turns = Annotated[Any, WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})]
System = Annotated[Any, WithJsonSchema(_TEXT)]
Tools = Annotated[Any, WithJsonSchema({"type": "array", "items": _TOOL})]
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE)]
Thinking = Annotated[Any, WithJsonSchema(_THINKING)]
OutputConfig = Annotated[Any, WithJsonSchema(_CONFIG)]
OutputFormat = Annotated[Any, WithJsonSchema(_FORMAT)]
Object = Annotated[Any, WithJsonSchema({"type": "object"})]


def _stop_sequences(value: object) -> list[str]:
    """Raises APIError 400."""
    place = Place(value, "stop_sequences")
    entries = [] if place.absent else place.entries()
    if len(entries) > MAX_STOP_STRINGS:
        raise place.must_be(f"a list of up to {MAX_STOP_STRINGS} strings")
    for entry in entries:
        if not 0 < len(entry.text()) <= MAX_STOP_LENGTH:
            raise entry.must_be(f"a string of 1 to {MAX_STOP_LENGTH} characters")
    return [entry.text() for entry in entries]


class CountTokensRequest(DecodingFields):
    """Body of POST /v1/messages/count_tokens. Fields that only tell how to answer change nothing here."""

    messages: Turns = Field(description="a list of messages")
    system: System = Field(None, description="a string or a list of text blocks")
    tools: Tools = Field(None, description="a list of tools")
    tool_choice: ToolChoice = Field(None, description="an object")
    thinking: Thinking = Field(None, description="an object")
    output_config: OutputConfig = Field(None, description="an object")
    output_format: OutputFormat = Field(None, description="an object")
    context_management: Object = Field(None, description="an object")
    chat_template_kwargs: Object = Field(None, description="an object")


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, description="an integer of at least 1")
    temperature: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    top_k: int | None = Field(None, ge=0, description="an integer of at least 1, or 0 for no limit")
    stop_sequences: Annotated[list[str], PlainValidator(_stop_sequences), WithJsonSchema(_STRINGS)] = Field(
        default_factory=list, description=f"a list of up to {MAX_STOP_STRINGS} strings, none empty"
    )


HARMLESS = frozenset({"cache_control", "user_profile_id"})

MESSAGES: Unsupported = {
    **COMMON,
    **dict.fromkeys(
        (
            "ebnf", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "regex",
            "response_format", "structural_tag", "structured_outputs",
        ),
        (_STRUCTURE, ()),
    ),
    "container": ("this server runs no tools of its own", ()),
    "diagnostics": ("'usage' says what was read from the cache", ({},)),
    "inference_geo": ("this server is where it is", ()),
    "logprobs": ("/v1/chat/completions and /v1/completions give log-probabilities", ()),
    "max_completion_tokens": ("use 'max_tokens'", ()),
    "mcp_servers": ("this server runs no tools of its own", ([],)),
    "n": ("a message has one answer", (1,)),
    "prompt": ("this route takes 'messages'", ()),
    "reasoning_effort": ("use 'output_config.effort' or 'thinking'", ()),
    "speed": ("there is one speed, 'standard'", ("standard",)),
    "stop": ("use 'stop_sequences'", ([],)),
    "stream_options": ("a stream has its usage always", ({"include_usage": True},)),
    "top_logprobs": ("/v1/chat/completions and /v1/completions give log-probabilities", (0,)),
}  # fmt: skip
