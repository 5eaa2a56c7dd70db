"""POST /tokenize and /detokenize: between text and token ids without a generation, in vLLM's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.api.body import parse_object, read_body
from server.api.chat.job import render_prompt
from server.api.chat.tools import offered_tools
from server.api.chat.wire import CHAT, ChatRequest
from server.api.errors import invalid
from server.api.fields import read_fields
from server.api.large import dump
from server.api.parameters import COMPLETIONS, ignored_header
from server.api.sampling import check_ids
from server.api.serve import in_place
from server.api.service import Service, served_name, service_of
from server.api.wire import Strict, Text, request_schema, token_ids
from server.generation import ModelCard

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"])


class TokenizePrompt(Strict):
    """Body of POST /tokenize with a text; one with `messages` is that of a chat, and `return_token_strs`."""

    model: Text | None = Field(None, description="a string, the name of a served model")
    prompt: Text = Field(description="a string; or send 'messages'")
    add_special_tokens: bool | None = Field(None, description="true or false")
    return_token_strs: bool | None = Field(None, description="true or false")


class TokenizeChat(ChatRequest):
    return_token_strs: bool | None = Field(None, description="true or false")


def _ids(value: object) -> list[int]:
    """Token ids; none at all is a list that is empty, not null."""
    if value is None:
        raise ValueError("must be a list of integer token ids; got null")
    return token_ids(value)


class Detokenize(Strict):
    """Body of POST /detokenize."""

    model: Text | None = Field(None, description="a string, the name of a served model")
    tokens: Annotated[
        list[int], PlainValidator(_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})
    ] = Field(description="a list of token ids")
    skip_special_tokens: bool | None = Field(None, description="true or false")


class TokenizeBody(TypedDict):
    """`token_strs`: as the tokens stand in the vocabulary, null unless asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(TypedDict):
    prompt: str


Answer = Callable[[Service, ModelCard, "Tokenizer", Mapping[str, Any]], tuple[str, Sequence[str]]]
"""(service, model, tokenizer, body) -> the answer as JSON and the body's unknown fields. Raises APIError."""


def _either(*kinds: type[BaseModel]) -> dict[str, Any]:
    """A `requestBody` that is of one of several types."""
    bodies = [request_schema(kind)["content"]["application/json"]["schema"] for kind in kinds]
    return {"required": True, "content": {"application/json": {"schema": {"anyOf": bodies}}}}


@router.post("/v1/tokenize", include_in_schema=False)
@router.post(
    "/tokenize",
    response_model=TokenizeBody,
    openapi_extra={"requestBody": _either(TokenizePrompt, TokenizeChat)},
)
async def tokenize(request: Request) -> Response:
    """The token ids of `prompt`, or of `messages` as the chat template writes them."""
    return await _answer(request, _tokenize)


@router.post("/v1/detokenize", include_in_schema=False)
@router.post("/detokenize", response_model=DetokenizeBody, openapi_extra={"requestBody": request_schema(Detokenize)})
async def detokenize(request: Request) -> Response:
    """The text of `tokens`, special ones shown unless `skip_special_tokens`."""
    return await _answer(request, _detokenize)


async def _answer(request: Request, answer: Answer) -> Response:
    """All of it in a worker: bodies and answers may have millions of tokens."""
    service = service_of(request)
    data = await read_body(request)
    model, tokenizer = service.ready_model()

    def work() -> tuple[bytes, Sequence[str]]:
        body, unknown = answer(service, model, tokenizer, parse_object(data))
        return body.encode(), unknown

    body, unknown = await in_place(request, service, len(data), work)
    return Response(body, 200, ignored_header(unknown), "application/json")


def _tokenize(
    service: Service, model: ModelCard, tokenizer: Tokenizer, raw: Mapping[str, Any]
) -> tuple[str, Sequence[str]]:
    if raw.get("messages") is None:
        text, unknown = read_fields(raw, TokenizePrompt, COMPLETIONS)
        served_name(text.model, model)
        ids, wants_strings = tokenizer.encode(text.prompt, text.add_special_tokens is not False), text.return_token_strs
    elif raw.get("prompt") is not None:
        raise invalid("prompt", "'prompt' and 'messages' exclude each other; send one of them.")
    else:
        chat, unknown = read_fields(raw, TokenizeChat, CHAT)
        served_name(chat.model, model)
        tools, _ = offered_tools(chat.tools, chat.tool_choice)
        template = service.chat_template(tokenizer)
        ids, wants_strings = render_prompt(chat, tools, template, model, "messages").ids, chat.return_token_strs
    strings = tokenizer.token_strings(ids) if wants_strings else None
    answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings}
    return dump(answer), unknown


def _detokenize(
    service: Service, model: ModelCard, tokenizer: Tokenizer, raw: Mapping[str, Any]
) -> tuple[str, Sequence[str]]:
    body, unknown = read_fields(raw, Detokenize, COMPLETIONS)
    served_name(body.model, model)
    check_ids("tokens", body.tokens, model)
    return json.dumps({"prompt": tokenizer.decode(body.tokens, bool(body.skip_special_tokens))}), unknown
