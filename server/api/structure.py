"""Structured output: what a body asks the text to be, in OpenAI's words and in those of other servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from server.api.errors import APIError, invalid, show
from server.text.grammar import GrammarError, GrammarSpec

if TYPE_CHECKING:
    from server.api.service import Service
    from server.step import Constraint

_FORMATS = "text, json_object, json_schema, regex and grammar"
_OUTPUTS = "json, json_object, regex, choice and grammar"
# Options of vLLM's `structured_outputs` whose value changes nothing here: JSON never has white space of the model's
# choice, and nothing falls back to another library.
_IDLE_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (True, False),
    "disable_fallback": (True, False),
}


def _object(value: object) -> object:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"must be an object; got {show(value)}")
    return value


def _text(value: object) -> object:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"must be a string; got {show(value)}")
    return value or None


def _texts(value: object) -> object:
    if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
        raise ValueError(f"must be a list of strings; got {show(value)}")
    return value


def _schema(value: object) -> object:
    if value is not None and not isinstance(value, dict | bool | str):
        raise ValueError(f"must be a JSON schema, as an object or as text; got {show(value)}")
    return value or None if isinstance(value, str) else value


_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_TEXTS = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}, {"type": "null"}]}

ObjectField = Annotated[dict[str, Any] | None, PlainValidator(_object), WithJsonSchema(_OBJECT)]
TextField = Annotated[str | None, PlainValidator(_text), WithJsonSchema(_TEXT)]
TextsField = Annotated[list[str] | None, PlainValidator(_texts), WithJsonSchema(_TEXTS)]
SchemaField = Annotated[dict[str, Any] | bool | str | None, PlainValidator(_schema), WithJsonSchema(_SCHEMA)]


class StructureFields(BaseModel):
    """Fields that say what the text is to be; one of them at most. Null and empty text are the same as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)

    response_format: ObjectField = Field(None, description=f"an object whose 'type' is one of {_FORMATS}")
    structured_outputs: ObjectField = Field(None, description=f"an object with one of {_OUTPUTS}")
    json_schema: SchemaField = Field(None, description="a JSON schema")
    regex: TextField = Field(None, description="a regular expression that the whole text matches")
    grammar: TextField = Field(None, description="a grammar in Lark or GBNF")
    ebnf: TextField = Field(None, description="a grammar in GBNF")
    guided_json: SchemaField = Field(None, description="a JSON schema")
    guided_regex: TextField = Field(None, description="a regular expression that the whole text matches")
    guided_choice: TextsField = Field(None, description="a list of strings")
    guided_grammar: TextField = Field(None, description="a grammar in Lark or GBNF")


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text is to be, and the field that says so."""

    spec: GrammarSpec
    param: str


def structure_of(body: StructureFields) -> Structure | None:
    """The one structure that a body asks for, None where the text is free. Raises APIError 400."""
    asked = list(_asked(body))
    if len(asked) > 1:
        first, second = asked[0].param, asked[1].param
        raise invalid(second, f"'{first}' and '{second}' both say what the text is to be; send one of them.")
    return asked[0] if asked else None


def constrainer(
    service: Service, spec: GrammarSpec, param: str, *, ignore_eos: bool = False
) -> Callable[[], Constraint]:
    """What makes the states of a grammar for one request's sequences; it is compiled here, so call this in a worker.

    Raises:
        APIError: 400 about `param` where the grammar cannot be followed.
    """
    try:
        grammar = service.grammars().compile(spec)
    except GrammarError as error:
        raise invalid(param, f"'{param}': {error}.") from None
    return grammar.starter(ignore_eos=ignore_eos)


def _asked(body: StructureFields) -> Iterator[Structure]:
    if body.response_format is not None and (structure := _response_format(body.response_format)) is not None:
        yield structure
    if body.structured_outputs is not None:
        yield _structured_outputs(body.structured_outputs)
    for name in ("json_schema", "guided_json"):
        if getattr(body, name) is not None:
            yield Structure(_json(getattr(body, name), name), name)
    for name in ("regex", "guided_regex"):
        if getattr(body, name) is not None:
            yield Structure(GrammarSpec("regex", _unicode(getattr(body, name), name)), name)
    if body.guided_choice is not None:
        yield Structure(_choice(body.guided_choice, "guided_choice"), "guided_choice")
    for name in ("grammar", "ebnf", "guided_grammar"):
        if getattr(body, name) is not None:
            yield Structure(GrammarSpec("lark", _unicode(getattr(body, name), name)), name)


def _response_format(value: Mapping[str, Any]) -> Structure | None:
    name = "response_format"
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            if value.get("schema") is None:
                return Structure(GrammarSpec("json_object"), name)
            return Structure(_json(value["schema"], f"{name}.schema"), f"{name}.schema")
        case "json_schema":
            if "json_schema" not in value and "schema" in value:  # llama.cpp
                return Structure(_json(value["schema"], f"{name}.schema"), f"{name}.schema")
            return _named_schema(value.get("json_schema"), f"{name}.json_schema")
        case "regex" | "grammar" as kind:
            given = [key for key in (kind, "pattern", "value") if value.get(key) is not None]
            param = f"{name}.{given[0] if given else kind}"
            if not given:
                raise _missing(param, "a string")
            spec = GrammarSpec("regex" if kind == "regex" else "lark", _unicode(value[given[0]], param))
            return Structure(spec, param)
        case None:
            raise _missing(f"{name}.type", f"one of {_FORMATS}")
        case kind:
            raise invalid(f"{name}.type", f"'{name}.type' must be one of {_FORMATS}; got {show(kind)}.")


def _named_schema(value: object, param: str) -> Structure:
    """OpenAI's {name, schema, strict, description}. The schema holds whether `strict` or not."""
    if value is None:
        raise _missing(param, "an object with a 'schema'")
    if not isinstance(value, dict):
        raise invalid(param, f"'{param}' must be an object with a 'schema'; got {show(value)}.")
    for key, kind, words in (
        ("name", str, "a string"),
        ("description", str, "a string"),
        ("strict", bool, "a boolean"),
    ):
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise invalid(f"{param}.{key}", f"'{param}.{key}' must be {words}; got {show(value[key])}.")
    if "schema" not in value:
        raise _missing(f"{param}.schema", "a JSON schema")
    return Structure(_json(value["schema"], f"{param}.schema"), f"{param}.schema")


def _structured_outputs(value: Mapping[str, Any]) -> Structure:
    name = "structured_outputs"
    asked: list[Structure] = []
    for key, item in value.items():
        param = f"{name}.{key[:60]}"
        if item is None or item in _IDLE_OPTIONS.get(key, ()):
            continue
        match key:
            case "json":
                asked.append(Structure(_json(item, param), param))
            case "json_object":
                if not isinstance(item, bool):
                    raise invalid(param, f"'{param}' must be true or false; got {show(item)}.")
                if item:
                    asked.append(Structure(GrammarSpec("json_object"), param))
            case "regex":
                asked.append(Structure(GrammarSpec("regex", _unicode(item, param)), param))
            case "choice":
                asked.append(Structure(_choice(item, param), param))
            case "grammar":
                asked.append(Structure(GrammarSpec("lark", _unicode(item, param)), param))
            case _:
                raise invalid(param, f"'{param}' is not supported: '{name}' takes {_OUTPUTS}.", "unsupported_parameter")
    if len(asked) != 1:
        given = f"; got {len(asked)}" if asked else ""
        raise invalid(name, f"'{name}' must have exactly one of {_OUTPUTS}{given}.")
    return asked[0]


def _json(schema: object, param: str) -> GrammarSpec:
    """A schema given as an object, or as text."""
    if isinstance(schema, str):
        text = _unicode(schema, param)
        if not text.lstrip().startswith(("{", "t", "f")):
            raise invalid(param, f"'{param}' must be a JSON schema; got {show(schema)}.")
        return GrammarSpec("json_schema", text)
    if not isinstance(schema, dict | bool):
        raise invalid(param, f"'{param}' must be a JSON schema; got {show(schema)}.")
    try:
        return GrammarSpec("json_schema", json.dumps(schema, allow_nan=False))
    except (RecursionError, ValueError):
        raise invalid(param, f"'{param}' is nested too deeply or holds a number that JSON has not.") from None


def _choice(texts: object, param: str) -> GrammarSpec:
    if not isinstance(texts, list) or not texts:
        got = "an empty list" if texts == [] else show(texts)
        raise invalid(param, f"'{param}' must be a list of at least one string; got {got}.")
    return GrammarSpec("choice", tuple(_unicode(text, param) for text in texts))


def _unicode(text: object, param: str) -> str:
    if not isinstance(text, str):
        raise invalid(param, f"'{param}' must be a string; got {show(text)}.")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise invalid(param, f"'{param}': text with an unpaired surrogate is not Unicode.")
    return text


def _missing(param: str, rule: str) -> APIError:
    return invalid(param, f"'{param}' is required: {rule}.", "missing_required_parameter")
