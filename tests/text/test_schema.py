"""Schemas are put into the form that the grammar library takes without changing what they permit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.text.schema import SchemaError, locate, prepare


def prepared(schema: Any) -> Any:
    return prepare(json.dumps(schema))


@pytest.mark.parametrize("keyword", [
    {"uniqueItems": False}, {"dependentRequired": {}}, {"unevaluatedProperties": True}, {"then": {"minimum": 3}},
    {"else": False}, {"minContains": 3}, {"format": "password"}, {"propertyNames": True},
    {"propertyNames": {"type": "string"}}, {"x-guidance": {"lenient": True}},
])  # fmt: skip
def test_what_asks_for_nothing_is_left_out(keyword: dict[str, Any]) -> None:
    assert prepared({"type": "object", **keyword}) == {"type": "object"}


def test_names_of_properties_are_said_by_other_keywords() -> None:
    integer = {"type": "integer"}
    closed = {"additionalProperties": False}
    assert prepared({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": integer}) == {
        "properties": {"a": integer, "b": integer},
        **closed,
    }
    assert prepared({"propertyNames": {"pattern": "^x"}}) == {"patternProperties": {"^x": True}, **closed}
    assert prepared({"propertyNames": {"minLength": 1, "maxLength": 3}}) == {
        "patternProperties": {"^[\\s\\S]{1,3}$": True},
        **closed,
    }
    kept = {"properties": {"a": integer}, "propertyNames": {"maxLength": 3}}
    assert prepared(kept) == kept, "for the library to refuse"


def test_the_library_may_not_be_told_to_be_lenient() -> None:
    assert "x-guidance" not in prepared({"x-guidance": {"lenient": True}, "type": "string"})


@pytest.mark.parametrize(("pattern", "refused"), [
    ("[a&&b]", True), ("[a[b]]", True), ("[a--c]", True), ("[a~~c]", True), ("[^[a]", True), ("x[]a[b]", True),
    (r"[a\[b]", False), ("[a&b]", False), ("a&&b", False), ("[a-z]+[0-9]", False), (r"\[[a-z]\]", False),
    ("[a-]-", False),
])  # fmt: skip
def test_set_operators_in_patterns_are_refused(pattern: str, refused: bool) -> None:
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: True}}):
        if refused:
            with pytest.raises(SchemaError, match="character class"):
                prepared(schema)
        else:
            prepared(schema)


@pytest.mark.parametrize("schema", [
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
])  # fmt: skip
def test_schemas_without_a_finite_value_are_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="finite"):
        prepared(schema)


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # a value of another type needs no "a"
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["a"]},
    {"$ref": "#/elsewhere"}, {"$ref": "other.json"}, {"$ref": "#anchor"},
])  # fmt: skip
def test_schemas_that_may_have_a_finite_value_pass(schema: Any) -> None:
    prepared(schema)


def test_a_keyword_is_located() -> None:
    schema = prepared({"properties": {"a/b~c": {"items": {"anyOf": [{}, {"not": {}}]}}}})
    assert locate(schema, "not") == "#/properties/a~1b~0c/items/anyOf/1"
    assert locate(schema, "if") == ""


def test_values_that_look_like_schemas_are_left_alone() -> None:
    schema = {"const": {"uniqueItems": False}, "default": {"properties": 3}, "enum": [{"then": 1}], "examples": [1]}
    assert prepared(schema) == schema


@pytest.mark.parametrize(("least", "names", "passes"), [
    (1, {}, True), (2, {}, False), (2, {"required": ["a"]}, True), (3, {"required": ["a"]}, False),
    (3, {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}, True),
])  # fmt: skip
def test_free_names_may_be_repeated_so_they_cannot_be_counted(least: int, names: dict[str, Any], passes: bool) -> None:
    schema = {"type": "object", "minProperties": least, **names}
    if passes:
        prepared(schema)
    else:
        with pytest.raises(SchemaError, match="minProperties"):
            prepared(schema)
