"""Grammars: every text that they let through is what was asked for, and what cannot be honoured is refused by name."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from itertools import pairwise
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for

from server.step import ConstraintFailed
from server.text import grammar as grammar_module
from server.text.grammar import Grammar, GrammarCompiler, GrammarError, GrammarSpec
from server.text.tokenizer import Tokenizer
from tests.text.conftest import made
from tests.text.walks import SCHEMAS, Walker, permitted

EOS = 2


@pytest.fixture(scope="module")
def compiler(embedded: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(embedded, embedded.vocab_size, {EOS, 0})


@pytest.fixture(scope="module")
def walker(embedded: Tokenizer) -> Walker:
    return Walker(embedded, embedded.vocab_size, {EOS, 0})


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def follow(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar lets this text through, token by token, and may then end."""
    state = grammar.start()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        if token_id not in permitted(state, tokenizer.vocab_size):
            return False
        state.accept(token_id)
    return state.finished or EOS in permitted(state, tokenizer.vocab_size)


@pytest.mark.parametrize("entry", SCHEMAS, ids=[entry["name"] for entry in SCHEMAS])
def test_outputs_satisfy_the_schema_or_it_is_refused_by_name(
    compiler: GrammarCompiler, walker: Walker, entry: dict[str, Any]
) -> None:
    if "refused" in entry:
        with pytest.raises(GrammarError) as refusal:
            compiler.compile(schema(entry["schema"]))
        assert entry["refused"] in str(refusal.value)
        return
    grammar = compiler.compile(schema(entry["schema"]))
    rules = entry["schema"] if isinstance(entry["schema"], dict) else {}
    kind = validator_for(rules, default=jsonschema.Draft202012Validator)
    validator = kind(rules, format_checker=kind.FORMAT_CHECKER)
    for seed in range(3):
        text = walker.walk(grammar.start(), Random(f"{entry['name']}{seed}"))
        if text is not None:
            validator.validate(json.loads(text))


def test_the_schemas_are_many_and_most_of_them_honoured() -> None:
    assert len(SCHEMAS) >= 200
    assert len({json.dumps(entry["schema"]) for entry in SCHEMAS}) == len(SCHEMAS)
    applications = [entry for entry in SCHEMAS if entry["name"].startswith("app-")]
    assert sum("refused" not in entry for entry in applications) >= 0.9 * len(applications)


def test_json_objects_have_no_white_space_of_the_models_choice(compiler: GrammarCompiler, walker: Walker) -> None:
    grammar = compiler.compile(GrammarSpec("json_object"))
    seen = 0
    for seed in range(30):
        text = walker.walk(grammar.start(), Random(seed))
        if text is not None:
            assert isinstance(json.loads(text), dict)
            bare = re.sub(r'"(?:[^"\\]|\\.)*"', "0", text)
            assert not re.search(r"\s", bare.replace(", ", ",").replace(": ", ":"))
            seen += 1
    assert seen > 5


def test_json_is_written_as_pythons_json_module_does(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    value = {"a": [1, 2.5, None, True], "b": {"c": "d e\n"}, "🦜": []}
    assert follow(compiler.compile(GrammarSpec("json_object")), embedded, json.dumps(value, ensure_ascii=False))
    assert not follow(compiler.compile(GrammarSpec("json_object")), embedded, json.dumps(value, indent=1))


@pytest.mark.parametrize("text", ["🦜漢é", 'quote " back \\ tab \t', "\u2028\u00a0", "", "é" * 40])
def test_constants_come_out_exactly(compiler: GrammarCompiler, walker: Walker, text: str) -> None:
    written = walker.walk(compiler.compile(schema({"const": text})).start(), Random(0))
    assert written is not None
    assert json.loads(written) == text


PATTERNS = [
    "[a-z]{2,5}", "^anchored$", "a|bc|d+", r"\d{3}-\d{4}", r"(foo|bar)(,(foo|bar))*", "[äöü]{1,3}", r"\/path\/[a-z]+",
    "(?i)yes|no", r"[^a-c\s]{1,3}", ".{0,8}", r"\w+@\w+\.(com|org)", "🦜{1,3}", "", "(a?){5}", r"\\\"'{1,2}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_expression_matches_the_whole_text(compiler: GrammarCompiler, walker: Walker, pattern: str) -> None:
    grammar = compiler.compile(GrammarSpec("regex", pattern))
    for seed in range(4):
        text = walker.walk(grammar.start(), Random(seed))
        if text is not None:
            assert re.fullmatch(pattern, text), text


# The embedded model has no token for some control characters, nor for the last planes.
characters = st.text(st.characters(exclude_categories=["Cc", "Cs"], max_codepoint=0xFFFF) | st.just("🦜"), max_size=12)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(characters, min_size=1, max_size=6), seed=st.integers())
def test_a_choice_is_one_of_its_texts(compiler: GrammarCompiler, walker: Walker, texts: list[str], seed: int) -> None:
    grammar = compiler.compile(GrammarSpec("choice", tuple(texts)))
    assert walker.walk(grammar.start(), Random(seed)) in texts


def test_grammars_in_lark_and_in_gbnf(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    lark = GrammarSpec("lark", 'start: "x = " sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/')
    gbnf = GrammarSpec("lark", 'root ::= "x = " sum\nsum ::= [0-9]+ ("+" [0-9]+)*\n')
    for spec in (lark, gbnf):
        grammar = compiler.compile(spec)
        assert follow(grammar, embedded, "x = 12+3")
        assert not follow(grammar, embedded, "x = 12+")
        assert not follow(grammar, embedded, "y")


def test_a_grammar_may_have_parts_and_special_tokens(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    parts = (("args", schema({"type": "object", "additionalProperties": {"type": "integer"}})),)
    grammar = compiler.compile(GrammarSpec("lark", 'start: "call " @args <|im_start|> "x"', parts))
    assert follow(grammar, embedded, 'call {"a": 1, "b": 22}<|im_start|>x')
    assert not follow(grammar, embedded, 'call {"a": 1,\n"b": 22}<|im_start|>x')
    assert not follow(grammar, embedded, 'call {"a": 1}x')
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiler.compile(GrammarSpec("lark", "start: @a", (("a", schema({"uniqueItems": True})),)))


def test_the_text_of_a_special_token_is_not_the_token(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    state = compiler.compile(GrammarSpec("lark", 'start: "<|im_start|>"')).start()
    (special,) = embedded.encode("<|im_start|>", add_special_tokens=False)
    assert special not in permitted(state, embedded.vocab_size)


MALFORMED = [
    (GrammarSpec("regex", "([oops"), "unclosed character class"),
    (GrammarSpec("regex", "a(?=b)"), "look-around"),
    (GrammarSpec("regex", "(" * 5000 + ")" * 5000), "nested"),
    (GrammarSpec("regex", "a" * 20_000), "limit"),
    (GrammarSpec("regex", "((a{1000}){1000}){1000}"), "repetitions"),
    (GrammarSpec("regex", "(a{1000,}){1000}"), "repetitions"),
    (GrammarSpec("regex", "a{1, 100000000}"), "repetitions"),
    (GrammarSpec("regex", r"[^\s\S]"), "permits no text"),
    (GrammarSpec("choice", ()), "at least one"),
    (GrammarSpec("choice", ("x" * 70_000,)), "characters"),
    (GrammarSpec("lark", ""), "empty"),
    (GrammarSpec("lark", "start: a"), "unknown name"),
    (GrammarSpec("lark", 'start: "a'), "1("),
    (GrammarSpec("lark", "start: start"), "permits no text"),
    (GrammarSpec("lark", "start: @elsewhere"), "elsewhere"),
    (GrammarSpec("lark", "start: <|nope|>"), "nope"),
    (GrammarSpec("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    (GrammarSpec("lark", "root ::= ("), "GBNF"),
    (GrammarSpec("json_schema", '{"type":"array","items":' * 3000 + "{}" + "}" * 3000), "nested"),
    (GrammarSpec("json_schema", "[" * 100_000), "nested"),
    (GrammarSpec("json_schema", "{"), "not valid JSON"),
    (GrammarSpec("json_schema", "[]"), "array"),
    (GrammarSpec("json_schema", '"x"'), "string"),
    (schema({"enum": ["x" * 1000] * 300}), "larger"),
    (schema({"const": "x" * 5000}), "4096"),
    (schema({"enum": list(range(90_000))}), "larger"),
    (schema({"enum": [[]] * 45_000}), "values"),
    (schema({"properties": {f"p{i}": {} for i in range(1001)}}), "properties"),
    (schema({"multipleOf": 1234567}), "multipleOf"),
    (schema({"allOf": [{"type": "integer", "multipleOf": 7919}, {"multipleOf": 7907}]}), "multipleOf"),
    (schema({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1200)}, "$ref": "#/$defs/d0"}), "refers"),
    (schema({"type": "array", "minItems": 10**9}), "minItems"),
    (schema({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in (0, 1)]} for i in range(20)]}), "large"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "reason"), MALFORMED, ids=[str(i) for i in range(len(MALFORMED))])
def test_what_is_malformed_or_too_large_is_refused_in_time(
    compiler: GrammarCompiler, spec: GrammarSpec, reason: str
) -> None:
    begun = time.perf_counter()
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(spec)
    assert time.perf_counter() - begun < 10
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 600


LARGE = [
    schema({"$defs": {**{f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(990)},
                      "d990": {}}, "$ref": "#/$defs/d0"}),
    schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}),
    schema({"enum": [f"value number {i}" for i in range(7000)]}),
    GrammarSpec("lark", "start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(4000)) + '\nR4000: "a"'),
    GrammarSpec("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'),
]  # fmt: skip


@pytest.mark.parametrize("spec", LARGE, ids=[str(i) for i in range(len(LARGE))])
def test_the_largest_that_are_possible_compile_and_are_followed(
    compiler: GrammarCompiler, walker: Walker, spec: GrammarSpec
) -> None:
    """They recurse deeply in the library, which an ordinary thread's stack would not bear."""
    walker.walk(compiler.compile(spec).start(), Random(1), limit=30)


def test_a_grammar_that_takes_too_long_to_follow_fails_its_text(
    compiler: GrammarCompiler, embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = compiler.compile(GrammarSpec("regex", "a+")).start()
    (letter,) = embedded.encode("a", add_special_tokens=False)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.2
        return now[0]

    monkeypatch.setattr(grammar_module.time, "thread_time", clock)

    def go_on(steps: int) -> None:
        for _ in range(steps):
            permitted(state, embedded.vocab_size)
            state.accept(letter)

    go_on(3)
    with pytest.raises(ConstraintFailed, match="too long"):
        go_on(5)


def test_the_texts_of_one_request_share_the_time_they_may_take(
    compiler: GrammarCompiler, embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else 128 choices could hold up their neighbours 128 times as long."""
    grammar = compiler.compile(GrammarSpec("regex", "a+"))
    now = itertools.count(0.0, 0.15)
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: next(now))
    begin = grammar.starter()

    def begin_many() -> None:
        for _ in range(20):
            permitted(begin(), embedded.vocab_size)

    with pytest.raises(ConstraintFailed, match="too long"):
        begin_many()
    permitted(grammar.start(), embedded.vocab_size)


def test_easy_tokens_earn_no_time_for_hard_ones(
    compiler: GrammarCompiler, embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = compiler.compile(GrammarSpec("regex", "a+")).start()
    (letter,) = embedded.encode("a", add_special_tokens=False)
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: 0.0)
    for _ in range(1000):
        state.accept(letter)
    now = itertools.count(0.0, 2.1)
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: next(now))
    with pytest.raises(ConstraintFailed, match="too long"):
        permitted(state, embedded.vocab_size)


def test_an_ambiguous_grammar_is_stopped_before_its_neighbours_notice(
    compiler: GrammarCompiler, embedded: Tokenizer
) -> None:
    """Each token has several ways to belong to those before it: one mask took seconds."""
    state = compiler.compile(GrammarSpec("lark", "start: s\ns: s s | s s s | W\nW: /./")).start()
    (letter,) = embedded.encode("a", add_special_tokens=False)
    begun = time.thread_time()

    def go_on() -> None:
        for _ in range(100):
            permitted(state, embedded.vocab_size)
            state.accept(letter)

    with pytest.raises(ConstraintFailed):
        go_on()
    assert time.thread_time() - begun < 3


def test_a_choice_may_be_as_large_as_is_said(compiler: GrammarCompiler, walker: Walker) -> None:
    """Also of texts that have no beginning in common."""
    texts = tuple(chr(0x10000 + index) * 5 for index in range(9000))
    assert walker.walk(compiler.compile(GrammarSpec("choice", texts)).start(), Random(1)) in texts


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_bpe", "byte_fallback_unigram"])
def test_every_tokenizer_of_bytes_can_write_any_character(kind: str) -> None:
    tokenizer = made(kind)
    assert tokenizer.eos_token_id is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    walker = Walker(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    for value in ("🦜漢é", " a b "):
        text = walker.walk(compiler.compile(schema({"const": value})).start(), Random(1))
        assert text is not None
        assert json.loads(text) == value


def test_what_the_vocabulary_cannot_write_fails_the_text_and_not_the_process() -> None:
    tokenizer = made("metaspace")
    assert tokenizer.eos_token_id is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, {tokenizer.eos_token_id})
    with pytest.raises(GrammarError, match="can be written with the model's tokens"):
        compiler.compile(GrammarSpec("choice", ("𝄞",)))


@pytest.mark.parametrize("kind", ["word_piece", "slow_bytes"])
def test_tokenizers_without_bytes_are_refused(kind: str) -> None:
    with pytest.raises(GrammarError, match="structured output needs a fast tokenizer"):
        GrammarCompiler(made(kind), 300, {1})


def test_ids_without_a_token_are_never_permitted() -> None:
    tokenizer = made("byte_level")
    padded = tokenizer.vocab_size + 70
    state = GrammarCompiler(tokenizer, padded, {2}).compile(GrammarSpec("regex", "(?s:.*)")).start()
    assert max(permitted(state, padded)) < tokenizer.vocab_size
    cut = 300
    state = GrammarCompiler(tokenizer, cut, {2}).compile(GrammarSpec("regex", "(?s:.*)")).start()
    assert max(permitted(state, cut)) < cut


def test_any_of_the_ends_may_follow_a_complete_text_and_none_an_incomplete_one(
    compiler: GrammarCompiler, embedded: Tokenizer
) -> None:
    state = compiler.compile(GrammarSpec("regex", "a|ab")).start()
    assert not {EOS, 0} & set(permitted(state, embedded.vocab_size))
    (letter,) = embedded.encode("a", add_special_tokens=False)
    state.accept(letter)
    assert not state.finished
    assert {EOS, 0} < set(permitted(state, embedded.vocab_size))
    state.accept(0)
    assert state.finished


def test_an_ignored_end_is_permitted_only_where_nothing_else_is(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    (letter,) = embedded.encode("a", add_special_tokens=False)
    state = compiler.compile(GrammarSpec("regex", "a|aa")).start(ignore_eos=True)
    state.accept(letter)
    assert permitted(state, embedded.vocab_size) == [letter]
    state.accept(letter)
    assert state.finished
    empty = compiler.compile(GrammarSpec("choice", ("",))).start(ignore_eos=True)
    assert permitted(empty, embedded.vocab_size) == [0, EOS]


def test_without_an_end_a_text_is_finished_when_nothing_may_follow() -> None:
    tokenizer = made("byte_level")
    for vocab_size in (tokenizer.vocab_size, 320, 321):
        compiler = GrammarCompiler(tokenizer, vocab_size, ())
        state = compiler.compile(GrammarSpec("choice", ("ab",))).start()
        for letter in "ab":
            (token_id,) = tokenizer.encode(letter, add_special_tokens=False)
            assert not state.finished
            assert vocab_size not in permitted(state, vocab_size)
            state.accept(token_id)
        assert state.finished
    with pytest.raises(GrammarError, match="empty text"):
        compiler.compile(GrammarSpec("choice", ("",)))


def test_a_mask_changes_nothing_and_states_are_their_own(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    grammar = compiler.compile(schema({"enum": ["one", "two"]}))
    first, second = grammar.start(), grammar.start()
    before = permitted(first, embedded.vocab_size)
    first.accept(embedded.encode('"', add_special_tokens=False)[0])
    assert permitted(first, embedded.vocab_size) == permitted(first, embedded.vocab_size) != before
    assert permitted(second, embedded.vocab_size) == before


def test_compiled_grammars_are_kept_and_the_oldest_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_CACHED", 3)
    specs = [GrammarSpec("choice", (f"text {i}",)) for i in range(4)]
    first, second, third = (compiler.compile(spec) for spec in specs[:3])
    assert compiler.compile(specs[0]) is first
    compiler.compile(specs[3])
    assert compiler.compile(specs[0]) is first
    assert compiler.compile(specs[2]) is third
    assert compiler.compile(specs[1]) is not second


def test_large_grammars_are_forgotten_sooner(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_CACHED_CHARACTERS", 100)
    small, large = GrammarSpec("choice", ("a", "b")), GrammarSpec("choice", ("c" * 90, "d" * 9))
    first = compiler.compile(small)
    assert compiler.compile(small) is first
    second = compiler.compile(large)
    assert compiler.compile(large) is second
    assert compiler.compile(small) is not first


def test_many_threads_may_compile_and_walk_at_once(compiler: GrammarCompiler, walker: Walker) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            grammar = compiler.compile(schema({"enum": [number % 3, "x"]}))
            assert walker.walk(grammar.start(), Random(number)) in (str(number % 3), '"x"')
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_state_may_be_used_by_one_thread_after_another(compiler: GrammarCompiler, embedded: Tokenizer) -> None:
    state = compiler.compile(schema({"const": "abc"})).start()
    seen: list[list[int]] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(permitted(state, embedded.vocab_size)))
        thread.start()
        thread.join()
    assert all(a == b for a, b in pairwise(seen))
    state.accept(seen[0][0])
