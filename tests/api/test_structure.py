"""The fields that ask for structured output: one structure at most, in anyone's words, refused where it cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.errors import APIError
from server.api.structure import StructureFields, structure_of
from server.api.wire import CompletionRequest, parse
from server.text.grammar import GrammarSpec
from tests.api.conftest import Served
from tests.api.test_validation import check_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
REGEX = GrammarSpec("regex", "[0-9]+")
LARK = GrammarSpec("lark", 'root ::= "a"')

SAME: list[tuple[dict[str, Any], GrammarSpec, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object"), "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        JSON, "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON, "response_format.schema"),
    ({"response_format": {"type": "regex", "pattern": "[0-9]+"}}, REGEX, "response_format.pattern"),
    ({"response_format": {"type": "regex", "value": "[0-9]+"}}, REGEX, "response_format.value"),
    ({"response_format": {"type": "grammar", "grammar": LARK.value}}, LARK, "response_format.grammar"),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}}, JSON,
     "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object"), "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, REGEX, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", ("a", "b")), "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": LARK.value}}, LARK, "structured_outputs.grammar"),
    ({"guided_json": SCHEMA}, JSON, "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, JSON, "guided_json"),
    ({"guided_regex": "[0-9]+"}, REGEX, "guided_regex"),
    ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", ("a", "b")), "guided_choice"),
    ({"guided_grammar": LARK.value}, LARK, "guided_grammar"),
    ({"json_schema": SCHEMA}, JSON, "json_schema"),
    ({"json_schema": json.dumps(SCHEMA)}, JSON, "json_schema"),
    ({"regex": "[0-9]+"}, REGEX, "regex"),
    ({"ebnf": LARK.value}, LARK, "ebnf"),
    ({"grammar": LARK.value}, LARK, "grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "spec", "param"), SAME, ids=[param for _, _, param in SAME])
def test_every_servers_words_are_understood(fields: dict[str, Any], spec: GrammarSpec, param: str) -> None:
    structure = structure_of(parse(CompletionRequest, {"prompt": "x", **fields}))
    assert structure is not None
    assert (structure.spec, structure.param) == (spec, param)


@pytest.mark.parametrize("fields", [
    {}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"guided_json": ""},
    {"regex": "", "grammar": "", "ebnf": ""}, {"response_format": {"type": "text"}, "structured_outputs": None},
])  # fmt: skip
def test_what_asks_for_nothing_leaves_the_text_free(fields: dict[str, Any]) -> None:
    assert structure_of(parse(CompletionRequest, {"prompt": "x", **fields})) is None


def response_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}}


HERE = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (response_format({"type": "string", "pattern": "([oops"}), HERE, "unclosed"),
    (response_format({"type": "banana"}), HERE, "banana"),
    (response_format({"$ref": "#/nowhere"}), HERE, "nowhere"),
    (response_format({"enum": []}), HERE, "no value"),
    (response_format([]), HERE, "JSON schema"),
    (response_format("x"), HERE, "JSON schema"),
    (response_format(None), HERE, "JSON schema"),
    (response_format({"not": {}}), HERE, "'not'"),
    (response_format({"properties": {"a": {"uniqueItems": True}}}), HERE, "#/properties/a"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, HERE, "required"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema", "object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
     "response_format.json_schema.strict", "boolean"),
    ({"response_format": {"type": "nonsense"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": ["text"]}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"response_format": {"type": "regex"}}, "response_format.regex", "required"),
    ({"response_format": {"type": "regex", "pattern": 3}}, "response_format.pattern", "string"),
    ({"response_format": {"type": "regex", "pattern": "("}}, "response_format.pattern", "("),
    ({"response_format": {"type": "grammar", "grammar": "start: x"}}, "response_format.grammar", "unknown name"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "choice"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "takes"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "takes"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
    ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice", "string"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": "a"}, "guided_choice", "list"),
    ({"guided_json": "not json"}, "guided_json", "JSON schema"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": 3}, "guided_json", "JSON schema"),
    ({"guided_regex": ["a"]}, "guided_regex", "string"),
    ({"regex": "a(?=b)"}, "regex", "look-around"),
    ({"regex": "a", "guided_json": {}}, "regex", "one of them"),
    ({"response_format": {"type": "json_object"}, "grammar": "x"}, "grammar", "one of them"),
    ({"regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "combined"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
async def test_what_cannot_be_honoured_is_refused_before_the_first_byte(served: Served, stream: bool) -> None:
    for fields, param, reason in REFUSED:
        error = check_error(await served.post(prompt="x", stream=stream, **fields))
        assert error["param"] == param, (fields, error)
        assert reason in error["message"], (fields, error)
    assert not served.engine.requests


async def test_deep_nesting_is_refused(served: Served) -> None:
    for nested in ("[" * 3000 + "]" * 3000, '{"items":' * 300 + "{}" + "}" * 300):
        for field in ('"guided_json":%s', '"response_format":{"type":"json_schema","json_schema":{"schema":%s}}'):
            body = f'{{"model":"tiny","prompt":"x",{field % nested}}}'
            response = await served.client.post(
                "/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            check_error(response)


async def test_surrogates_and_numbers_that_are_none_are_refused(served: Served) -> None:
    for field in ('"regex":"\\ud800"', '"guided_choice":["\\ud800"]', '"guided_json":"{\\"const\\":\\"\\ud800\\"}"',
                  '"guided_json":{"const":1e999}', '"guided_json":{"const":"\\ud800"}',
                  '"json_schema":{"properties":{"\\ud800":{}}}', '"grammar":"start: \\"\\ud800\\""'):  # fmt: skip
        response = await served.client.post(
            "/v1/completions",
            content=f'{{"model":"tiny","prompt":"x",{field}}}',
            headers={"content-type": "application/json"},
        )
        check_error(response)


async def test_each_sequence_has_a_state_of_its_own(served: Served) -> None:
    response = await served.post(prompt=["x", "y"], n=2, guided_regex="[a-z]{3}")
    assert response.status_code == 200, response.text
    constraints = [request.constraint for request in served.engine.requests]
    assert len({id(constraint) for constraint in constraints}) == 4
    assert None not in constraints
    await served.post(prompt="x")
    assert served.engine.requests[-1].constraint is None


async def test_the_same_grammar_is_compiled_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.post(prompt="x", guided_json=SCHEMA)
    compiler = served.app.state.service.grammars()

    def fail(spec: GrammarSpec) -> None:
        raise AssertionError("it was compiled already")

    monkeypatch.setattr(compiler, "_compile", fail)
    assert (await served.post(prompt="x", json_schema=SCHEMA)).status_code == 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "json_schema", "schema", "json", "regex", "choice", "pattern", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(sorted(StructureFields.model_fields)), VALUES, max_size=2))
def test_any_value_is_a_structure_or_a_refusal(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        structure_of(parse(CompletionRequest, {"prompt": "x", **fields}))
    except APIError as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and (refusal.param or "").split(".")[0] in fields)
