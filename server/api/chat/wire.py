"""The bodies of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, PlainValidator, WithJsonSchema
from typing_extensions import TypedDict

from server.api.chat.messages import MESSAGES_SCHEMA, check_messages
from server.api.chat.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA, ToolChoice, check_tool_choice, check_tools
from server.api.parameters import COMMON, Unsupported
from server.api.structure import StructureFields
from server.api.wire import MAX_LOGPROBS, SamplingFields, UsageBody

_TEXT_ONLY = "this is a text model"
_IN_TEMPLATE = "use 'chat_template_kwargs'"
_NO_SCORES = "use /v1/completions with 'echo' and 'logprobs' to score a prompt"

CHAT: Unsupported = {
    **COMMON,
    "add_special_tokens": ("the chat template writes all that the model expects", ()),
    "chat_template": ("the operator chooses the template, with --chat-template", ()),
    "documents": (_IN_TEMPLATE, ([],)),
    "echo": ("use /v1/completions", ()),
    "function_call": ("use 'tool_choice'", ("none", "auto")),
    "functions": ("use 'tools'", ([],)),
    "media_io_kwargs": (_TEXT_ONLY, ({},)),
    "mm_processor_kwargs": (_TEXT_ONLY, ({},)),
    "prediction": ("outputs are not predicted by the client", ()),
    "prompt": ("this route takes 'messages'", ()),
    "prompt_embeds": ("use 'messages'", ()),
    "prompt_logprobs": (_NO_SCORES, ()),
    "reasoning": ("use 'reasoning_effort'", ({},)),
    "suffix": ("this route takes 'messages'", ()),
    "thinking": (_IN_TEMPLATE, ({},)),
    "verbosity": ("ask for it in the 'messages'", ("medium",)),
    "web_search_options": ("this server does not search", ()),
}

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields, StructureFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], PlainValidator(check_messages), WithJsonSchema(MESSAGES_SCHEMA)] = Field(
        description="a list of messages"
    )
    max_completion_tokens: int | None = Field(None, ge=0, description="an integer of at least 0")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
    tools: Annotated[list[dict[str, Any]], PlainValidator(check_tools), WithJsonSchema(TOOLS_SCHEMA)] = Field(
        default_factory=list, description="a list of tools"
    )
    tool_choice: Annotated[ToolChoice | None, PlainValidator(check_tool_choice), WithJsonSchema(TOOL_CHOICE_SCHEMA)] = (
        Field(None, description="none, auto, required or the tool to call")
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    reasoning_effort: Effort | None = Field(None, description="one of none, minimal, low, medium, high, xhigh and max")
    include_reasoning: bool | None = Field(None, description="true or false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object")
    add_generation_prompt: bool | None = Field(None, description="true or false")
    continue_final_message: bool | None = Field(None, description="true or false")


class TopScoreBody(TypedDict):
    """A token by its text, `\\xf0\\x9f` where its bytes are no whole character, and by its bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ScoreBody(TopScoreBody):
    top_logprobs: list[TopScoreBody]


class ScoresBody(TypedDict):
    content: list[ScoreBody]
    refusal: None


class FunctionBody(TypedDict):
    name: str
    arguments: str


class ToolCallBody(TypedDict):
    id: str
    type: str
    function: FunctionBody


class MessageBody(TypedDict):
    """`content` is null where the reply is nothing but calls."""

    role: str
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatChoiceBody(TypedDict):
    index: int
    message: MessageBody
    logprobs: ScoresBody | None
    finish_reason: str
    stop_reason: str | int | None


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class ChatUsageBody(UsageBody):
    completion_tokens_details: CompletionTokensDetails


class ChatBody(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoiceBody]
    usage: ChatUsageBody
