"""The bodies of requests and answers.

A request is checked whole against its type before anything is done with it; a field's description is what its error
says is possible. Types are strict: "0.5" and true are no numbers, and 1.0 is no integer, as at OpenAI.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from typing_extensions import TypedDict

from server.api.errors import APIError, invalid, show
from server.api.structure import StructureFields
from server.config import MOST_KV_BUDGET

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_N = 128

Prompt = str | list[int]


def check_text(value: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and cannot be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("text with an unpaired surrogate is not Unicode") from None
    return value


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}  # by type: a bool is an int


def _prompts(value: object) -> list[Prompt]:
    """One prompt or several, each text or token ids."""
    items: list[Any] = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not items:
        raise ValueError("'prompt' is an empty list; send at least one token id or one prompt.")
    for index, item in enumerate(items):
        if isinstance(item, str):
            check_text(item)
        elif not _is_ids(item):
            where = f"'prompt[{index}]'" if isinstance(value, list) else "'prompt'"
            if item == []:
                raise ValueError(f"{where} is an empty list; send at least one token id.")
            raise ValueError(f"{where} must be a string or a list of integer token ids; got {show(item)}.")
    return items


def _stop(value: object) -> list[str]:
    items: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if len(items) > MAX_STOP_STRINGS:
        raise ValueError(f"'stop' may hold up to {MAX_STOP_STRINGS} strings; got {len(items)}.")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"'stop' must be a string or a list of strings; got {show(item)}.")
        if not 0 < len(check_text(item)) <= MAX_STOP_LENGTH:
            raise ValueError(f"a 'stop' string must have 1 to {MAX_STOP_LENGTH} characters; got {len(item)}.")
    return items


def _logit_bias(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"'logit_bias' must be an object from token ids to numbers; got {show(value)}.")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
            raise ValueError(f"a key of 'logit_bias' must be a token id, as \"49\"; got {show(key)}.")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"'logit_bias[{key}]' must be a number from -100 to 100; got {show(bias)}.")
        biases[int(key)] = float(bias)
    return biases


def token_ids(value: object) -> list[int]:
    if value is None or value == []:
        return []
    if not _is_ids(value):
        raise ValueError(f"must be a list of integer token ids; got {show(value)}")
    assert isinstance(value, list)
    return value


def _not_zero(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("must be an integer of at least 1, or -1 to keep what fits beside 'max_tokens'; got 0")
    return value


Text = Annotated[str, AfterValidator(check_text)]
_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {"anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}}]}
_STOP = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS}]}
_BIAS = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="true or false")
    continuous_usage_stats: bool | None = Field(None, description="true or false")
    include_obfuscation: Literal[False] | None = Field(None, description="false: chunks are not padded")


class DecodingFields(Strict):
    """What every generating route takes; null is the same as absent.

    Defaults of temperature, top_k, top_p, min_p and repetition_penalty are the model's own (its generation config),
    else OpenAI's.
    """

    model: Text | None = Field(None, description="a string, the name of a served model")
    stream: bool | None = Field(None, description="true or false")
    min_tokens: int | None = Field(None, ge=0, description="an integer of at least 0")
    temperature: float | None = Field(None, ge=0, le=2, description="a number from 0 to 2")
    top_k: int | None = Field(None, ge=-1, description="an integer of at least 1, or 0 or -1 for no limit")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0, up to 1")
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    repetition_penalty: float | None = Field(None, ge=0.01, le=2, description="a number from 0.01 to 2")
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias), WithJsonSchema(_BIAS)] = Field(
        default_factory=dict, description="an object from token ids to numbers from -100 to 100"
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="an integer of 64 bits")
    stop_token_ids: Annotated[list[int], PlainValidator(token_ids), WithJsonSchema(_IDS)] = Field(
        default_factory=list, description="a list of token ids"
    )
    allowed_token_ids: Annotated[list[int], PlainValidator(token_ids), WithJsonSchema(_IDS)] = Field(
        default_factory=list, description="a list of token ids"
    )
    ignore_eos: bool | None = Field(None, description="true or false")
    include_stop_str_in_output: bool | None = Field(None, description="true or false")
    skip_special_tokens: bool | None = Field(None, description="true or false")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="an integer of 32 bits, lower runs earlier"
    )
    cache_salt: Text | None = Field(None, max_length=256, description="a string of up to 256 characters")
    cache_prompt: bool | None = Field(None, description="true, or false to compute the prompt anew")
    kv_budget: int | None = Field(
        None, ge=1, le=MOST_KV_BUDGET, description=f"an integer, twice --block-size or more, up to {MOST_KV_BUDGET}"
    )
    kv_policy: Literal["h2o", "window"] | None = Field(None, description="h2o or window")
    queue_timeout: float | None = Field(None, gt=0, le=86400, description="a number of seconds above 0, up to 86400")
    request_timeout: float | None = Field(None, gt=0, le=86400, description="a number of seconds above 0, up to 86400")


class SamplingFields(DecodingFields):
    """The same under OpenAI's names for completions and chat."""

    n: int | None = Field(None, ge=1, le=MAX_N, description=f"an integer from 1 to {MAX_N}")
    stream_options: StreamOptions | None = Field(None, description="an object")
    max_tokens: int | None = Field(None, ge=0, description="an integer of at least 0")
    stop: Annotated[list[str], PlainValidator(_stop), WithJsonSchema(_STOP)] = Field(
        default_factory=list, description=f"a string or up to {MAX_STOP_STRINGS} strings, none empty"
    )


class CompletionRequest(SamplingFields, StructureFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts), WithJsonSchema(_PROMPT)] = Field(
        description="a string, a list of token ids, or a list of either"
    )
    suffix: Text | None = Field(None, description="a string, the text that follows the answer")
    echo: bool | None = Field(None, description="true or false")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description=f"an integer from 1 to {MAX_N}, at least 'n'")
    add_special_tokens: bool | None = Field(None, description="true or false")
    truncate_prompt_tokens: Annotated[int | None, AfterValidator(_not_zero)] = Field(
        None, ge=-1, description="an integer of at least 1, or -1 to keep what fits beside 'max_tokens'"
    )
    return_token_ids: bool | None = Field(None, description="true or false")
    return_tokens_as_token_ids: bool | None = Field(None, description="true or false")


Body = TypeVar("Body", bound=Strict)


def parse(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """`body` as `kind`. Raises APIError 400 that names the first field at fault, its value and what is possible."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(kind, error) from None


def _explain(kind: type[BaseModel], error: ValidationError) -> APIError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "missing":
        return invalid(name, f"'{name}' is required: {_rule(kind, path)}.", "missing_required_parameter")
    if first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        return invalid(name, reason if name in reason else f"'{name}': {reason}.")
    return invalid(name, f"'{name}' must be {_rule(kind, path)}; got {show(first['input'])}.")


def _rule(kind: type[BaseModel], path: Collection[str]) -> str:
    rule = ""
    for part in path:
        info = kind.model_fields[part]
        rule = info.description or rule
        if part == "stream_options":
            kind = StreamOptions
    return rule


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class UsageBody(TypedDict):
    """`kv_evicted_tokens`, of all choices together, is there where they have a budget; 0 is an exact answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kv_evicted_tokens: NotRequired[int]


class LogprobsBody(TypedDict):
    """Four lists of one length, an entry a token; joined, `tokens` are the text, each from its `text_offset` on."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChoiceBody(TypedDict):
    index: int
    text: str
    logprobs: LogprobsBody | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class CompletionBody(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: UsageBody


class ModelBody(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    default_sampling: dict[str, float]


class ModelList(TypedDict):
    object: str
    data: list[ModelBody]


def usage_body(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, evicted_tokens: int | None = None
) -> UsageBody:
    """evicted_tokens: None where no budget was in force."""
    usage: UsageBody = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if evicted_tokens is not None:
        usage["kv_evicted_tokens"] = evicted_tokens
    return usage


def evictions(usage: UsageBody) -> dict[str, int]:
    """What every route's usage has beside its own fields where a budget was in force."""
    return {"kv_evicted_tokens": usage["kv_evicted_tokens"]} if "kv_evicted_tokens" in usage else {}


def members(*names: str) -> dict[str, Any]:
    """The `properties` of a schema, for an object whose members are checked elsewhere."""
    return {name: {} for name in names}


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, whole or, with `stream`, as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
"""What OpenAPI says of a route that generates."""


def request_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a body with its definitions put in place, as OpenAPI's `requestBody` wants it."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    for name in schema["properties"].keys() - set(schema.get("required", ())):
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}  # the same as absent

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rpartition("/")[2]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    return {"required": True, "content": {"application/json": {"schema": inline(schema)}}}
