"""What the grammars permit parses to calls whose arguments fit their schemas, and nothing else is permitted."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from server.text.formats import ReplyFormat, reply_format
from server.text.grammar import GrammarCompiler, GrammarSpec
from server.text.reply import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from tests.text.templates import wrapped

TOKENIZER = wrapped(None)
EOS = TOKENIZER.eos_token_id
assert EOS is not None
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, {EOS})
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["</tool_call>", "x}"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "get_time": {"properties": {"when": {"type": "boolean"}}, "required": ["when"], "additionalProperties": False},
    "nothing": {},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
SOURCES = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral-args": "[TOOL_CALLS][ARGS]",
    "deepseek": "<｜tool▁call▁begin｜><｜tool▁sep｜>```json",
    "deepseek-3.1": "<｜tool▁call▁begin｜><｜tool▁sep｜>",
    "json": "",
}
REASONING = {"none": "", "text": "</think>", "special": "[/THINK]"}


def formatted(kind: str, reasoning: str = "none") -> ReplyFormat:
    form = reply_format(SOURCES[kind] + REASONING[reasoning], TOKENIZER, None)
    return ReplyFormat(form.syntax, None, TOKENIZER) if reasoning == "none" else form


def permits(spec: GrammarSpec, text: str, ends: bool = True) -> bool:
    """Whether a grammar lets `text` be written, and then end."""
    state = COMPILER.compile(spec).start()
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for token_id in [*ids, EOS] if ends else ids:
        if not token_id_permitted(state, token_id):
            return False
        state.accept(token_id)
    return True


def mask(state: Any) -> Any:
    words = np.zeros(-(-TOKENIZER.vocab_size // 32), dtype=np.int32)
    if not state.finished:
        state.fill_mask(words)
    else:
        words[EOS // 32] |= 1 << (EOS % 32)
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def token_id_permitted(state: Any, token_id: int) -> bool:
    return bool(mask(state)[token_id])


def walk(spec: GrammarSpec, rng: random.Random, prefix: str = "") -> str:
    """A text that the grammar permits, chosen at random, ended as soon as possible every other time."""
    state = COMPILER.compile(spec).start()
    ids = TOKENIZER.encode(prefix, add_special_tokens=False)
    for token_id in ids:
        assert token_id_permitted(state, token_id)
        state.accept(token_id)
    quote, brace = TOKENIZER.encode('"}', add_special_tokens=False)
    while not state.finished:
        allowed = np.flatnonzero(mask(state)).tolist()
        early = [token_id for token_id in (EOS, brace, quote) if token_id in allowed]
        token_id = early[0] if early and rng.random() < 0.5 else rng.choice(allowed)
        if token_id == EOS:
            break
        ids.append(token_id)
        state.accept(token_id)
        assert len(ids) < 20_000
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def parsed(form: ReplyFormat, text: str, prompt: str = "", tools: Any = TOOLS) -> list[Part]:
    parser = form.parser(prompt, tools=tools)
    return parser.feed(text) + parser.finish()


def calls(parts: list[Part]) -> list[tuple[str, str]]:
    arguments: dict[int, str] = {}
    names = [part.name for part in parts if isinstance(part, ToolCallStart)]
    for part in parts:
        if isinstance(part, ToolCallArguments):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    return [(name, arguments[index]) for index, name in enumerate(names)]


def check(found: list[tuple[str, str]]) -> None:
    for name, arguments in found:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        jsonschema.validate(value, SCHEMAS[name])


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_is_forced_parses_to_calls_that_fit(kind: str, parallel: bool) -> None:
    form, rng = formatted(kind), random.Random(kind)
    spec = form.call_grammar(TOOLS, None, parallel, "")
    counts = set()
    for _ in range(25):
        parts = parsed(form, walk(spec, rng))
        found = calls(parts)
        check(found)
        assert not any(isinstance(part, Content | Reasoning) for part in parts)
        counts.add(len(found))
    assert counts == {1} if not parallel else max(counts) > 1
    assert max(counts) <= 16


@pytest.mark.parametrize("kind", SOURCES)
def test_a_named_function_is_called_once(kind: str) -> None:
    form, rng = formatted(kind), random.Random(1)
    spec = form.call_grammar(TOOLS, "get_time", True, "")
    for _ in range(5):
        ((name, arguments),) = calls(parsed(form, walk(spec, rng)))
        assert (name, json.loads(arguments).keys()) == ("get_time", {"when"})


@pytest.mark.parametrize("kind", SOURCES)
def test_written_calls_are_what_the_grammar_permits_and_the_parser_reads(kind: str) -> None:
    form = formatted(kind)
    written = [("get", '{"a": 1}'), ("get_time", '{"when": true}')]
    text = form.syntax.write(written)
    assert calls(parsed(form, text)) == written
    assert permits(form.call_grammar(TOOLS, None, True, ""), text)
    assert not permits(form.call_grammar(TOOLS, None, False, ""), text)
    assert not permits(form.call_grammar(TOOLS, None, True, ""), form.syntax.write([("get", '{"a": "1"}')]))


@pytest.mark.parametrize("reasoning", ["text", "special"])
def test_reasoning_comes_before_what_is_forced(reasoning: str) -> None:
    form = formatted("hermes", reasoning)
    opening, closing = ("<think>", "</think>") if reasoning == "text" else ("[THINK]", "[/THINK]")
    answer = form.answer_grammar(GrammarSpec("choice", ("yes", "no")), "")
    call = form.call_grammar(TOOLS, "get", False, "")
    for spec, text in ((answer, "yes"), (call, form.syntax.write([("get", '{"a": 1}')]))):
        assert permits(spec, text)
        assert permits(spec, f"{opening}\nhm yes\n{closing}\n\n{text}")
        assert not permits(spec, f"{opening}\nhm{text}")
        assert not permits(spec, "hm", ends=False)
    opened = form.answer_grammar(GrammarSpec("choice", ("yes", "no")), f"x{opening}\n")
    assert permits(opened, f"hm{closing}\n\nyes")
    assert not permits(opened, "yes")
    closed = form.answer_grammar(GrammarSpec("choice", ("yes", "no")), f"x{opening}\n\n{closing}\n\n")
    assert closed == GrammarSpec("choice", ("yes", "no"))
    assert formatted("hermes").answer_grammar(closed, "") is closed


@pytest.mark.parametrize("kind", SOURCES)
def test_strict_functions_may_be_called_only_rightly(kind: str) -> None:
    form, rng = formatted(kind), random.Random(kind)
    assert form.strict_grammar(TOOLS, True, "") is None
    spec = form.strict_grammar(STRICT, True, "")
    assert spec is not None
    assert permits(spec, "Just words, and no call.")
    assert permits(spec, "")
    right = form.syntax.write([("get", '{"a": 1}'), ("get_time", '{"when": true}')])
    assert permits(spec, right)
    assert not permits(spec, form.syntax.write([("get", '{"a": "1"}')]))
    assert not permits(spec, form.syntax.write([("other", "{}")]))
    if kind != "llama3":
        assert permits(spec, "Let me see.\n" + right)
        assert not permits(spec, "Let me see.\n" + form.syntax.write([("get", '{"a": 1, "c": 2}')]))
    for _ in range(10):
        opener = form.syntax.openers[0]
        check(calls(parsed(form, walk(spec, rng, "x" + opener))))


def test_functions_that_are_not_strict_take_any_object() -> None:
    form = formatted("hermes")
    spec = form.strict_grammar([TOOLS[0], STRICT[1]], True, "")
    assert spec is not None
    assert permits(spec, form.syntax.write([("get", '{"z": 1}')]))
    assert not permits(spec, form.syntax.write([("get_time", '{"z": 1}')]))
