"""From the object that a client sent to the fields of its body, and the names of all that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

from pydantic import BaseModel

from server.api.parameters import MOST_NAMES, Unsupported, check_unhandled
from server.api.wire import Body, parse, request_schema

_Schema = Mapping[str, Any]


def read_fields(
    raw: Mapping[str, Any], kind: type[Body], unsupported: Unsupported, harmless: frozenset[str] = frozenset()
) -> tuple[Body, list[str]]:
    """The checked body, and what it has that changes nothing. Raises APIError 400.

    harmless: further fields that only describe the request.
    """
    unknown = check_unhandled(raw, kind.model_fields.keys() | harmless, unsupported)
    body = parse(kind, raw)
    return body, [*unknown, *unknown_members(raw, kind)]


def unknown_members(body: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """As `messages[0].foo`, for the header that says what changes nothing; no more than that one shows.

    Members that are null, false or empty ask for nothing. What a schema leaves open, like the parameters of a tool, is
    not looked into.
    """
    fields = _fields(kind)
    found = (name for key in fields.keys() & body.keys() for name in _unknown(body[key], fields[key], key))
    return sorted(islice(found, MOST_NAMES + 1))


@cache
def _fields(kind: type[BaseModel]) -> _Schema:
    fields: _Schema = request_schema(kind)["content"]["application/json"]["schema"]["properties"]
    return fields


def _unknown(value: object, schema: _Schema, path: str) -> Iterator[str]:
    if isinstance(value, list) and (items := _part(schema, "items")) is not None:
        for index, item in enumerate(value):
            yield from _unknown(item, items, f"{path}[{index}]")
    elif isinstance(value, dict) and (members := _part(schema, "properties")) is not None:
        for key, item in value.items():
            if key in members:
                yield from _unknown(item, members[key], f"{path}.{key}")
            elif item:
                yield f"{path}.{key}"


def _part(schema: _Schema, keyword: str) -> _Schema | None:
    """What the schema, or one of the alternatives that it is made of, has under `keyword`."""
    if keyword in schema:
        found: _Schema = schema[keyword]
        return found
    alternatives = (_part(option, keyword) for option in schema.get("anyOf", ()))
    return next((found for found in alternatives if found is not None), None)
