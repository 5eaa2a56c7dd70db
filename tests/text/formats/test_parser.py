"""Replies told apart into reasoning, content and calls, the same however their text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.text.formats import ReplyFormat, reply_format
from server.text.formats.reasoning import KNOWN
from server.text.reply import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from tests.text.templates import CHATML, DEEPSEEK, LLAMA3, MISTRAL, QWEN, wrapped

TOKENIZER = wrapped(None)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "get_time")]
FORMS = {name: reply_format("", TOKENIZER, name) for name in ("hermes", "llama3", "mistral", "deepseek", "json")}
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def merged(parts: list[Part]) -> list[Part]:
    """The parts with neighbours of one kind joined, as a whole answer shows them."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + part.text)
        elif isinstance(part, ToolCallArguments) and isinstance(last, ToolCallArguments) and last.index == part.index:
            whole[-1] = ToolCallArguments(part.index, last.text + part.text)
        else:
            whole.append(part)
    return whole


def parse(form: ReplyFormat, pieces: list[str], prompt: str = "", tools: Any = TOOLS) -> list[Part]:
    parser = form.parser(prompt, tools=tools)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return merged(parts + parser.finish())


def call(index: int, name: str, arguments: str, call_id: str | None = None) -> list[Part]:
    return [ToolCallStart(index, name, call_id), ToolCallArguments(index, arguments)]


F = '{"name": "f", "arguments": {"a": [1, "x}"]}}'
CASES = [
    pytest.param("hermes", f"<tool_call>\n{F}\n</tool_call>", call(0, "f", '{"a": [1, "x}"]}'), id="one"),
    pytest.param(
        "hermes",
        f"Well. \n<tool_call>{F}</tool_call>\n<tool_call>\n{F}\n</tool_call>\n",
        [Content("Well."), *call(0, "f", '{"a": [1, "x}"]}'), *call(1, "f", '{"a": [1, "x}"]}')],
        id="content and two",
    ),
    pytest.param(
        "hermes",
        '<tool_call>{"arguments": {"q": "\\"</tool_call>"}, "id": "c1", "name": "g"}</tool_call> Done.',
        [*call(0, "g", '{"q": "\\"</tool_call>"}', "c1"), Content("Done.")],
        id="fields in another order, a tag in a string",
    ),
    pytest.param(
        "hermes",
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
        call(0, "f", "{}") + call(1, "g", "{}"),
        id="a list, no arguments",
    ),
    pytest.param(
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "f", '{"a": 1}'),
        id="text",
    ),
    pytest.param("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}"), id="null"),
    pytest.param(
        "hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', call(0, "f", "{}"), id="a brace too many"
    ),
    pytest.param(
        "hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', call(0, "f", "{}"), id="a brace too few"
    ),
    pytest.param(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x',
        [*call(0, "f", '{"a": 1'), Content("x")],
        id="arguments that break off",
    ),
    pytest.param(
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', call(0, "f", '{"a": "b'), id="cut in arguments"
    ),
    pytest.param("hermes", '<tool_call>{"name": "f", "argu', [ToolCallStart(0, "f")], id="cut after the name"),
    pytest.param("hermes", 'a <tool_call>{"nam', [Content('a <tool_call>{"nam')], id="cut before the name"),
    pytest.param("hermes", "a \n<tool_call> b", [Content("a \n<tool_call> b")], id="no call"),
    pytest.param("hermes", "<tool_call>{'name': 1}", [Content("<tool_call>{'name': 1}")], id="no JSON"),
    pytest.param("hermes", F, [Content(F)], id="bare JSON is content"),
    pytest.param("hermes", " a <tool_ca \n", [Content(" a <tool_ca \n")], id="nothing"),
    pytest.param(
        "llama3",
        '{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "get_time", "parameters": {}}',
        call(0, "f", '{"a": 1}') + call(1, "get_time", "{}"),
        id="bare, two",
    ),
    pytest.param(
        "llama3", '<|python_tag|>{"name": "g", "parameters": {"a": 1}}', call(0, "g", '{"a": 1}'), id="python tag"
    ),
    pytest.param("llama3", ' {"name": "Eve", "age": 3}', [Content(' {"name": "Eve", "age": 3}')], id="other JSON"),
    pytest.param("llama3", '{"name": "f", "age": 3}', [Content('{"name": "f", "age": 3}')], id="JSON with such a name"),
    pytest.param("llama3", f"It is {F}", [Content(f"It is {F}")], id="JSON further on"),
    pytest.param(
        "llama3", f"{F} and more", [*call(0, "f", '{"a": [1, "x}"]}'), Content("and more")], id="text after a call"
    ),
    pytest.param(
        "mistral",
        'Ok.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc123abc"}, {"name": "g", "arguments": {}}]',
        [Content("Ok."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        id="list",
    ),
    pytest.param(
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]c1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        call(0, "f", '{"a": 1}', "c1") + call(1, "g", "{}"),
        id="since version 11",
    ),
    pytest.param("mistral", "[TOOL_CALLS]no call", [Content("[TOOL_CALLS]no call")], id="mistral, no call"),
    pytest.param(
        "deepseek",
        f'Ok.\n{ALL_BEGIN}{BEGIN}function{SEP}f\n```json\n{{"a": 1}}\n```{END}\n{BEGIN}function{SEP}g\n```json\n{{}}\n```{END}{ALL_END}',  # noqa: E501
        [Content("Ok."), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        id="V3 and R1",
    ),
    pytest.param(
        "deepseek",
        f'{ALL_BEGIN}{BEGIN}f{SEP}{{"a": 1}}{END}{BEGIN}g{SEP}{{}}{END}{ALL_END}',
        call(0, "f", '{"a": 1}') + call(1, "g", "{}"),
        id="V3.1",
    ),
    pytest.param("deepseek", f"{ALL_BEGIN} no", [Content(f"{ALL_BEGIN} no")], id="deepseek, no call"),
    pytest.param("json", f"<tool_call>{F}</tool_call>", call(0, "f", '{"a": [1, "x}"]}'), id="json, in tags"),
    pytest.param("json", F, call(0, "f", '{"a": [1, "x}"]}'), id="json, bare"),
    pytest.param(
        "json",
        '{"name": "f", "arguments": {"a": "1\n2\t"}}',
        call(0, "f", '{"a": "1\\n2\\t"}'),
        id="a line in a string",
    ),
]


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_calls_are_told_apart(name: str, text: str, parts: list[Part]) -> None:
    assert parse(FORMS[name], [text]) == parts
    assert parse(FORMS[name], list(text)) == parts


@pytest.mark.parametrize("name", FORMS)
def test_no_call_is_looked_for_without_tools(name: str) -> None:
    text = f"a {FORMS[name].syntax.write([('f', '{}')])} b "
    assert parse(FORMS[name], [text], tools=[]) == [Content(text)]


@pytest.mark.parametrize("tags", KNOWN, ids=lambda tags: tags.open)
def test_reasoning_is_told_apart(tags: Any) -> None:
    form = reply_format(f"{tags.open}{tags.close}", TOKENIZER, None)
    whole = [Reasoning("hm\n  hm"), Content("yes")]
    reply = f"hm\n  hm\n{tags.close}\n\nyes"
    assert parse(form, [f"\n{tags.open}\n{reply}"]) == whole
    assert parse(form, [f"\n{reply}"], prompt=f"<|im_start|>assistant\n{tags.open}\n") == whole
    assert parse(form, [f"  hm\n{tags.close}yes"], prompt=f"x<|im_end|>{tags.open}first") == [Reasoning("hm"), whole[1]]
    assert parse(form, ["hm\n"], prompt=tags.open) == [Reasoning("hm\n")]
    assert parse(form, [" yes"], prompt=f"{tags.open}\n\n{tags.close}\n\n") == [Content(" yes")]
    assert parse(form, [" yes"], prompt=f"what is {tags.open}?<|im_end|>") == [Content(" yes")]
    assert parse(form, [f"the tag {tags.open}"]) == [Content(f"the tag {tags.open}")]


def test_calls_come_after_reasoning() -> None:
    reply = f"<think>\n<tool_call>{F}</tool_call>?\n</think>\n\n<tool_call>\n{F}\n</tool_call>"
    assert parse(FORMS["hermes"], [reply]) == [
        Reasoning(f"<tool_call>{F}</tool_call>?"),
        *call(0, "f", '{"a": [1, "x}"]}'),
    ]


MARKUP = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    BEGIN, SEP, END, ALL_BEGIN, ALL_END, "function", "f", "\n```json\n", "```", F, "[", "]", "{", "}", '"', "\\", ",",
    ":", ";", " ", "\n", "a", "<", "<tool_", "1", "null", '"name": "f"', '"arguments": {"x": "y"}', '{"name": "f", ',
    "🦜",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)),
    text=st.lists(st.sampled_from(MARKUP), max_size=14).map("".join),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    opened=st.booleans(),
)
@example(name="hermes", text=f"<tool_call>{F}<tool_call>", cuts=[3], opened=False)
def test_parts_do_not_depend_on_how_the_text_is_cut(name: str, text: str, cuts: list[int], opened: bool) -> None:
    prompt = "<think>" if opened else ""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = parse(FORMS[name], [text], prompt)
    assert parse(FORMS[name], pieces, prompt) == whole
    assert parse(FORMS[name], list(text), prompt) == whole
    starts = [part for part in whole if isinstance(part, ToolCallStart)]
    assert [part.index for part in starts] == list(range(len(starts)))


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("<tool_cal> \nab{"), max_size=40))
def test_text_without_calls_is_kept_to_the_letter(text: str) -> None:
    assert "".join(part.text for part in parse(FORMS["hermes"], list(text)) if isinstance(part, Content)) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)),
    arguments=st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=3),
    indent=st.none() | st.integers(0, 2),
)
def test_arguments_arrive_as_they_were_written(name: str, arguments: list[Any], indent: int | None) -> None:
    written = [("f", json.dumps(value, indent=indent, ensure_ascii=False)) for value in arguments]
    expected = [part for index, (_, text) in enumerate(written) for part in call(index, "f", text)]
    assert parse(FORMS[name], list(FORMS[name].syntax.write(written))) == expected


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    parser = FORMS["hermes"].parser("", tools=TOOLS)
    assert parser.feed("Hello") == [Content("Hello")]
    assert parser.feed(" you <") == [Content(" you")]
    assert parser.feed("b> ") == [Content(" <b>")]
    assert parser.feed("<tool_call>") == []
    assert parser.feed('\n{"name": "f') == []
    assert parser.feed('", "arguments"') == [ToolCallStart(0, "f")]
    assert parser.feed(': {"a": "lo') == [ToolCallArguments(0, '{"a": "lo')]
    assert parser.feed('ng"}') == [ToolCallArguments(0, 'ng"}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("source", "name"),
    [(CHATML, "json"), (QWEN, "hermes"), (LLAMA3, "llama3"), (MISTRAL, "mistral"), (DEEPSEEK, "deepseek")],
)
def test_the_template_shows_the_format(source: str, name: str) -> None:
    form = reply_format(source, TOKENIZER, "auto")
    assert form.name == name
    assert form.marker_ids == {TOKENIZER.token_id(text) for text in form.syntax.markers} & TOKENIZER.special_ids
    assert reply_format(source, TOKENIZER, "hermes").name == "hermes"
