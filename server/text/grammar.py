"""Grammars that an output follows: JSON, JSON Schema, regular expressions, choices and context-free grammars.

They are those of llguidance 1.9.1, in its Lark dialect. Over the 276 schemas of the tests and random texts along their
masks it broke 5 that it accepts, all of which `server.text.schema` now refuses; xgrammar 0.2.9 broke 45. A mask over
49,152 tokens takes 11 us at the median and 0.5 ms at the 99th percentile (xgrammar: 4 us and 20 ms), over 129,280
tokens 11 us and 1.1 ms; a schema compiles in 0.5 ms (1.3 ms). `loadtest/grammars.py` measures it anew.

JSON is written on one line, as Python's json.dumps does: the model chooses no white space, so none is endless.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from server.step import ConstraintFailed, Int32Array
from server.text.schema import SchemaError, locate, prepare
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

Kind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_PATTERN = 16 * 1024
MAX_CHOICES = 10_000
MAX_GRAMMAR = 64 * 1024
MAX_NESTING = 96
MAX_REPETITION = 100_000
_CACHED = 64
_CACHED_CHARACTERS = 2**23
_UNWRITABLE = "nothing that the grammar permits can be written with the model's tokens"
# How long the texts of one request may keep their neighbours waiting: seconds of a processor, and more for each token,
# but never more at once. The library's own limit on the work of one operation keeps that under a third of a second.
_SECONDS = 2.0
_SECONDS_PER_TOKEN = 0.01
_MOST_ITEMS = 20_000
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
# Compiling recurses along references: a schema of as many subschemas as are possible needs this much, of which only
# what is used becomes memory.
_STACK_BYTES = 512 * 2**20
_stack_lock = threading.Lock()


class GrammarError(ValueError):
    """A grammar that cannot be followed. The message names the feature or the place at fault."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a text is to be.

    kind: "json_object" is any JSON object, without a value.
    value: for "json_schema" the schema as JSON text; for "regex" an expression that the whole text matches; for
        "choice" the texts, one of which it is; for "lark" a grammar in llguidance's dialect of Lark, or GBNF.
    parts: further grammars, by the names under which a "lark" one refers to them: `start: "answer: " @json`.
    """

    kind: Kind
    value: str | tuple[str, ...] = ""
    parts: tuple[tuple[str, GrammarSpec], ...] = ()


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the last ones. Safe to use from any thread.

    It takes a second for a large vocabulary to make one, and milliseconds to compile; neither belongs on an event loop.

    vocab_size: ids from here on are never permitted.
    eos_token_ids: permitted wherever the text may end.

    Raises:
        GrammarError: the tokenizer's tokens do not stand for bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        if not tokenizer.spells:
            raise GrammarError(
                "structured output needs a fast tokenizer whose tokens stand for bytes (byte-level or byte-fallback), "
                "which this model has not"
            )
        self._ends = _Ends(vocab_size, frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size))
        self._tokens = _vocabulary(tokenizer, self._ends)
        self._cache: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """The grammar of `spec`.

        Raises:
            GrammarError: it is malformed, too large, not supported, or permits no text.
        """
        with self._lock:
            if spec in self._cache:
                self._cache.move_to_end(spec)
                return self._cache[spec]
        grammar = _with_deep_stack(lambda: self._compile(spec))
        with self._lock:
            self._cache[spec] = grammar
            while len(self._cache) > 1 and (
                len(self._cache) > _CACHED or sum(map(_num_characters, self._cache)) > _CACHED_CHARACTERS
            ):
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, spec: GrammarSpec) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        schemas: list[dict[str, Any]] = []
        grammars = [{"name": name, **_source(part, schemas)} for name, part in _named(spec)]
        limits = LLParserLimits(
            max_items_in_row=4 * 2000, step_max_items=_MOST_ITEMS, max_lexer_states=100_000, verbose_errors=False
        )
        matcher = LLMatcher(self._tokens, json.dumps({"grammars": grammars}), log_level=0, limits=limits)
        problems = [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings()
        if problems:
            raise GrammarError(_explain(problems[0], schemas))
        grammar = Grammar(matcher, self._ends)
        try:
            permitted = grammar.permitted()  # which also prepares what all sequences share
        except ConstraintFailed as error:
            raise GrammarError(f"the grammar permits no text: {error}") from None
        if not self._ends.eos_token_ids and not permitted.any():
            raise GrammarError("the grammar permits the empty text alone")
        return grammar


class Grammar:
    """A compiled grammar, from which each sequence takes a state of its own."""

    def __init__(self, matcher: LLMatcher, ends: _Ends) -> None:
        self._matcher = matcher
        self._ends = ends

    def starter(self, *, ignore_eos: bool = False) -> Callable[[], GrammarState]:
        """What makes the states, before the first token, of one request's texts. They share the time they may take.

        ignore_eos: a text goes on for as long as the grammar permits anything but its end.
        """
        allowance = _Allowance()
        return lambda: GrammarState(self._matcher.deep_copy(), self._ends, ignore_eos, allowance)

    def start(self, *, ignore_eos: bool = False) -> GrammarState:
        """The state of the only text of a request."""
        return self.starter(ignore_eos=ignore_eos)()

    def permitted(self) -> Int32Array:
        """The mask of the first token."""
        mask = np.zeros(self._ends.num_words, dtype=np.int32)
        self.start().fill_mask(mask)
        return mask


class _Allowance:
    """What is left of the time that the texts of one request may take, of the processor: others may keep that busy."""

    def __init__(self) -> None:
        self.seconds = _SECONDS

    def use(self, seconds: float) -> None:
        """Raises ConstraintFailed. Threads may meet here and one of them not count, which changes little."""
        self.seconds = min(_SECONDS, self.seconds - seconds)
        if self.seconds < 0:
            raise ConstraintFailed("the grammar is so complex that it takes too long to follow")


class GrammarState:
    """How far one text has come; a `server.step.Constraint`."""

    def __init__(self, matcher: LLMatcher, ends: _Ends, ignore_eos: bool, allowance: _Allowance) -> None:
        self._matcher = matcher
        self._ends = ends
        self._ignore_eos = ignore_eos
        self._allowance = allowance
        self._buffer = np.zeros(ends.matcher_words, dtype=np.int32)

    def fill_mask(self, mask: Int32Array) -> None:
        begun = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._buffer.ctypes.data, self._buffer.nbytes)
        self._check(time.thread_time() - begun)
        self._ends.write(self._buffer, mask, self._ignore_eos)
        if not mask.any() and self._ends.eos_token_ids:
            raise ConstraintFailed(_UNWRITABLE)

    def accept(self, token_id: int) -> None:
        begun = time.thread_time()
        self._matcher.consume_token(token_id)
        self._check(time.thread_time() - begun - _SECONDS_PER_TOKEN)

    def _check(self, seconds: float) -> None:
        """After an operation that took so long; in error, the library would permit the end of the text alone."""
        if self._matcher.is_error():
            problem = _first_line(self._matcher.get_error())
            if problem.startswith("NoExtension"):
                raise ConstraintFailed(_UNWRITABLE)
            raise ConstraintFailed(f"the grammar cannot be followed further: {problem}")
        self._allowance.use(seconds)

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()


class _Ends:
    """The tokens that end a text, and their bits.

    The library wants one such token. Where the model has none it gets an id beyond the vocabulary, whose bit is left
    out of every mask.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.num_tokens = vocab_size if eos_token_ids else vocab_size + 1
        self.matcher_ids = sorted(eos_token_ids) or [vocab_size]
        self.num_words = -(-vocab_size // 32)
        self.matcher_words = -(-self.num_tokens // 32)
        bits = np.zeros(32 * self.matcher_words, dtype=np.uint8)
        bits[self.matcher_ids] = 1
        self._others: Int32Array = ~np.packbits(bits, bitorder="little").view(np.int32)

    def write(self, permitted: Int32Array, mask: Int32Array, ignore_eos: bool) -> None:
        """Copy what the library permits, without the ends where they do not count or are not all there is."""
        mask[:] = permitted[: self.num_words]
        if ignore_eos or not self.eos_token_ids:
            others = permitted & self._others
            if others.any() or not self.eos_token_ids:
                mask[:] = others[: self.num_words]


class _Vocabulary:
    """Tokens as the library wants them told."""

    def __init__(self, tokenizer: Tokenizer, ends: _Ends) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) or b"" for token_id in range(ends.num_tokens)]
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends.matcher_ids} & set(range(ends.num_tokens)))
        if not ends.eos_token_ids:
            self.tokens[-1] = b"<|end of text|>"
        self.eos_token_id = ends.matcher_ids[0]
        self.bos_token_id = tokenizer.bos_token_id

        self._ids = {data: token_id for token_id, data in enumerate(self.tokens) if data}
        for token_id in self.special_token_ids:
            self._ids.pop(self.tokens[token_id], None)
        self._plain = set(range(len(self.tokens))) - set(self.special_token_ids)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell exactly this text, where there are such: how the library writes what a grammar forces.

        They are the tokenizer's own unless it adds to a text, like SentencePiece's space at the start, or takes it for
        a special token.
        """
        data = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(data.decode(errors="replace"), add_special_tokens=False)
        if all(token_id in self._plain for token_id in ids) and b"".join(map(self.tokens.__getitem__, ids)) == data:
            return ids
        ids = []
        start = 0
        while start < len(data):
            lengths = range(min(self._longest, len(data) - start), 0, -1)
            length = next((length for length in lengths if data[start : start + length] in self._ids), None)
            if length is None:
                return ids
            ids.append(self._ids[data[start : start + length]])
            start += length
        return ids


def _vocabulary(tokenizer: Tokenizer, ends: _Ends) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Vocabulary(tokenizer, ends))
    return LLTokenizer(wrapped, n_vocab=ends.num_tokens, eos_token=ends.matcher_ids)


def _num_characters(spec: GrammarSpec) -> int:
    texts = (spec.value,) if isinstance(spec.value, str) else spec.value
    return sum(map(len, texts)) + sum(_num_characters(part) for _, part in spec.parts)


def _named(spec: GrammarSpec) -> list[tuple[str, GrammarSpec]]:
    """The grammar, first, and all its parts."""
    found: dict[str, GrammarSpec] = {"": spec}
    pending = [spec]
    while pending:
        for name, part in pending.pop().parts:
            if found.setdefault(name, part) != part:
                raise GrammarError(f"two parts of the grammar are named {name!r}")
            pending.append(part)
    return list(found.items())


def _source(spec: GrammarSpec, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """One grammar as the library reads it; prepared schemas are also added to `schemas`."""
    if spec.kind == "choice":
        return {"lark_grammar": _choice(spec.value)}
    assert isinstance(spec.value, str), "only a choice has several texts"
    match spec.kind:
        case "json_object":
            return {"json_schema": {"type": "object", "x-guidance": _JSON_OPTIONS}}
        case "json_schema":
            try:
                schema = prepare(spec.value)
            except SchemaError as error:
                raise GrammarError(str(error)) from None
            schemas.append(schema)
            return {"json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}
        case "regex":
            return {"lark_grammar": _regex(spec.value)}
    return {"lark_grammar": _lark(spec.value)}


def _choice(texts: str | tuple[str, ...]) -> str:
    if isinstance(texts, str) or not texts:
        raise GrammarError("a choice needs at least one text")
    if len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_GRAMMAR:
        raise GrammarError(f"a choice may have up to {MAX_CHOICES} texts and {MAX_GRAMMAR} characters in all")
    # A terminal: it is followed by one automaton, whereas the parser would hold all the texts side by side.
    return "start: TEXT\nTEXT: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts))


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    if len(pattern) > MAX_PATTERN:
        raise GrammarError(f"the expression has {len(pattern)} characters, the limit is {MAX_PATTERN}")
    _check_nesting(pattern)
    most = 1
    for least, count in re.findall(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}", pattern):
        most *= max(1, int((count or least or "1")[:9]))
    if most > MAX_REPETITION:
        raise GrammarError(f"the counts of repetitions in the expression multiply to more than {MAX_REPETITION}")
    return f"start: /{regex_to_lark(pattern)}/"


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if len(text) > MAX_GRAMMAR:
        raise GrammarError(f"the grammar has {len(text)} characters, the limit is {MAX_GRAMMAR}")
    if not text.strip():
        raise GrammarError("the grammar is empty")
    _check_nesting(text)
    if is_lark_syntax(text) or "::=" not in text:
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:
        raise GrammarError(f"the GBNF grammar cannot be read: {_first_line(str(error))}") from None


def _check_nesting(text: str) -> None:
    depth = 0
    for bracket in re.findall(r"[(\[{}\])]", text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        if depth > MAX_NESTING:
            raise GrammarError(f"brackets are nested more than {MAX_NESTING} deep")


def _with_deep_stack(function: Callable[[], T]) -> T:
    """Call it on a thread with a stack that no permitted grammar fills: an overflow would end the process."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # raised again where it is waited for
            failure.append(error)

    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _explain(problem: str, schemas: list[dict[str, Any]]) -> str:
    """The library's message in words that a client can act upon."""
    if found := re.match(r"Unimplemented keys: (\[.*\])", problem):
        keywords: list[str] = json.loads(found[1])
        places = [place for schema in schemas if (place := locate(schema, keywords[0]))]
        names = ", ".join(f"'{name[:40]}'" for name in keywords[:4])
        return f"the schema keyword {names} is not supported" + (f" (at {places[0][:200]})" if places else "")
    if problem.startswith("oneOf constraints"):
        place = next((place for schema in schemas if (place := locate(schema, "oneOf"))), "#")
        return (
            f"'oneOf' is supported only where its branches exclude each other, as by a required 'const' property or "
            f"different types (at {place[:200]}): use 'anyOf'"
        )
    if found := re.match(r"Unknown format: (.*)", problem):
        return (
            f"the format '{found[1][:60]}' is not supported; date, time, date-time, duration, email, hostname, ipv4, "
            "ipv6, uri and uuid are"
        )
    if found := re.match(r"Resource '(.*?)' is not present", problem):
        return f"'$ref' to '{found[1][:100]}' is not supported: a schema may refer to itself only"
    if found := re.match(r"Pointer '(.*?)' does not exist", problem):
        return f"'$ref' to '#{found[1][:100]}', which does not exist"
    if found := re.match(r"Unsatisfiable schema: (.*)", problem):
        return f"the schema permits no value: {found[1][:300]}"
    if found := re.search(r"regex parse error:\n +(.*)\n(?:.*\n)*?error: (.*)", problem):
        return f"the expression '{found[1][:100]}' is not supported: {found[2][:200]}"
    return _first_line(problem)


def _first_line(text: str) -> str:
    """The library's messages go on with the source and a mark below it."""
    return text.partition("\n")[0][:300]
