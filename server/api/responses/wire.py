"""The body of a request to /v1/responses, and its fields that are refused.

What lies deeper than one level (`input`, `tools`, ...) is checked by the translation, which walks it anyway.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from server.api.parameters import COMMON, Unsupported
from server.api.wire import MAX_LOGPROBS, DecodingFields, StreamOptions, Text, members

STATELESS = "this server keeps no responses; send the whole conversation as 'input'"
_STRUCTURE = "use 'text.format'"


# Also what clients send back of an answer: it says something about its text, not to the model.
_PARTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"properties": members("type", "text", "refusal", "annotations", "logprobs")}},
    ]
}
_ITEM = {
    "type": "object",
    "required": ["type"],
    "properties": {
        **members("type", "id", "status", "role", "call_id", "name", "arguments", "summary", "encrypted_content"),
        "content": _PARTS,
        "output": _PARTS,
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "name", "parameters"],
    "properties": members("type", "name", "description", "parameters", "strict"),
}
_FORMAT = {"type": "object", "properties": members("type", "name", "description", "schema", "strict")}

Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]})]
Tools = Annotated[Any, WithJsonSchema({"type": "array", "items": _TOOL})]
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {"type": "object", "required": ["type"], "properties": members("type", "name")},
            ]
        }
    ),
]
TextConfig = Annotated[
    Any,
    WithJsonSchema(
        {"type": "object", "properties": {"verbosity": {}, "format": {"anyOf": [_FORMAT, {"type": "null"}]}}}
    ),
]
Reasoning = Annotated[
    Any,
    WithJsonSchema(
        {"type": "object", "properties": members("effort", "summary", "generate_summary", "context", "mode")}
    ),
]
Strings = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "string"}})]
StringMap = Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}})]
Object = Annotated[Any, WithJsonSchema({"type": "object"})]


class ResponsesRequest(DecodingFields):
    """Body of POST /v1/responses."""

    input: Input = Field(description="a string or a list of items")
    instructions: Text | None = Field(None, description="a string")
    max_output_tokens: int | None = Field(None, ge=1, description="an integer of at least 1")
    stop: Any = Field(None, description="a string or a list of strings")
    tools: Tools = Field(None, description="a list of tools")
    tool_choice: ToolChoice = Field(None, description="a string or an object")
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    text: TextConfig = Field(None, description="an object")
    reasoning: Reasoning = Field(None, description="an object")
    include: Strings = Field(None, description="a list of strings")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
    truncation: Literal["disabled"] | None = Field(
        None, description='"disabled" (what to leave out of an input that is too long is the client\'s choice)'
    )
    metadata: StringMap = Field(None, description="an object from strings to strings")
    store: Literal[False] | None = Field(None, description=f"false ({STATELESS})")
    stream_options: StreamOptions | None = Field(None, description="an object")
    chat_template_kwargs: Object = Field(None, description="an object")
    user: Text | None = Field(None, description="a string")


# The second counts calls of tools that this server does not have.
HARMLESS = frozenset({"client_metadata", "max_tool_calls"})

RESPONSES: Unsupported = {
    **COMMON,
    **dict.fromkeys(
        (
            "ebnf", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema", "regex",
            "response_format", "structural_tag", "structured_outputs",
        ),
        (_STRUCTURE, ()),
    ),
    "background": (STATELESS, ()),
    "background_options": (STATELESS, ({},)),
    "context_management": ("shorten the input before it is sent", ([],)),
    "conversation": (STATELESS, ()),
    "function_call": ("use 'tool_choice'", ()),
    "functions": ("use 'tools'", ([],)),
    "logprobs": ("use 'include': [\"message.output_text.logprobs\"] and 'top_logprobs'", ()),
    "max_completion_tokens": ("use 'max_output_tokens'", ()),
    "max_new_tokens": ("use 'max_output_tokens'", ()),
    "max_tokens": ("use 'max_output_tokens'", ()),
    "messages": ("this route takes an 'input'", ()),
    "moderation": ("this server does not moderate", ()),
    "n": ("a response has one answer", (1,)),
    "n_predict": ("use 'max_output_tokens'", ()),
    "previous_response_id": (STATELESS, ()),
    "prompt": ("prompt templates are not kept here; send 'instructions' and 'input'", ()),
    "reasoning_effort": ("use 'reasoning.effort'", ()),
    "verbosity": ("say in 'instructions' how long the answer shall be", ("medium",)),
}  # fmt: skip
