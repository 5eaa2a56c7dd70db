"""Grammars of replies: calls that must come, calls that must be right if they come, answers after reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.text.formats.reasoning import Tags
from server.text.formats.syntaxes import Syntax
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.text.grammar import GrammarSpec

MAX_CALLS = 16


class ReplyGrammar:
    """Builds the grammar of one reply.

    tags: around reasoning, which may come first; None where there is to be none.
    opened: whether the prompt has begun it.
    """

    def __init__(self, syntax: Syntax, tags: Tags | None, opened: bool, tokenizer: Tokenizer) -> None:
        self._syntax = syntax
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._before = ""
        if tags is not None:
            self._before = "reasoning " if opened else "(opening reasoning)? "
            self._rules += self._reasoning(tags)

    def calls(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> GrammarSpec:
        """Calls of `tools` and nothing else, one or, with `parallel`, up to `MAX_CALLS`."""
        begin, end = self._literal(self._syntax.begin), self._literal(self._syntax.end)
        start = f"start: {self._before}{begin} {self._calls(parallel)} {end}"
        rules, parts = self._call_rules(tools)
        return _lark([start, *self._rules, *rules], parts)

    def text_or_calls(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> GrammarSpec:
        """Text in which a call, once its opener is written, is one of `tools` with arguments that follow its schema.

        Where bare JSON at the start of an answer may be a call, no text begins with a brace.
        """
        syntax = self._syntax
        opener = syntax.openers[0]
        text = r"(\s*[^{\s](?s:.*))?" if syntax.bare else "(?s:.*)"
        if (opener_id := self._special_id(opener)) is None:
            opened = f"opened[lazy]: /{text}{re.escape(opener)}/"
        else:
            opened = f"opened: /{text}/ <[{opener_id}]>"
        calls = self._calls(parallel)
        each = syntax.around("")[0].startswith(opener)  # the opener stands before every call, not before all of them
        block = (
            "call"
            if each
            else f"{self._literal(syntax.begin.removeprefix(opener))} {calls} {self._literal(syntax.end)}"
        )
        answer = f"(opened block){'*' if parallel and each else '?'} /{text}/"
        if syntax.bare and not each:
            answer += f" | {calls}"
        rules, parts = self._call_rules(tools, opener if each else "")
        start = [f"start: {self._before}({answer})", opened, f"block: {block}"]
        return _lark([*start, *self._rules, *rules], parts)

    def answer(self, spec: GrammarSpec) -> GrammarSpec:
        """An answer that follows `spec`."""
        if not self._before:
            return spec
        return _lark([f"start: {self._before}@answer", *self._rules], [("answer", spec)])

    def _calls(self, parallel: bool) -> str:
        more = f" ({self._literal(self._syntax.separator)} call){{0,{MAX_CALLS - 1}}}"
        return "call" + (more if parallel else "")

    def _call_rules(
        self, tools: Sequence[Mapping[str, Any]], read: str = ""
    ) -> tuple[list[str], list[tuple[str, GrammarSpec]]]:
        """The rule `call`: any of `tools`, of whose text the beginning `read` is there already."""
        rules = ["call: " + " | ".join(f"call{i}" for i in range(len(tools)))]
        parts = []
        for i, tool in enumerate(tools):
            before, after = self._syntax.around(tool["function"]["name"])
            rules.append(f"call{i}: {self._literal(before.removeprefix(read))} @arguments{i} {self._literal(after)}")
            parts.append((f"arguments{i}", _arguments(tool)))
        return rules, parts

    def _reasoning(self, tags: Tags) -> list[str]:
        close_id = self._special_id(tags.close)
        text = "/(?s:.*)/"  # bounded by the request's limit of tokens: counting costs the matcher a state a character
        if close_id is None:
            rules = [f"thought[suffix={_quoted(tags.close)}]: {text}", r"reasoning: thought /\n{0,2}/"]
        else:
            rules = [rf"reasoning: {text} <[{close_id}]> /\n{{0,2}}/"]
        return [*rules, f"opening: {self._literal(tags.open)}"]

    def _literal(self, text: str) -> str:
        """A text in the grammar, the special tokens in it by their ids."""
        markers = [marker for marker in self._tokenizer.special_texts if marker in text]
        pieces = re.split(f"({'|'.join(map(re.escape, markers))})", text) if markers else [text]
        return " ".join(
            _quoted(piece) if (token_id := self._special_id(piece)) is None else f"<[{token_id}]>"
            for piece in pieces
            if piece
        )

    def _special_id(self, text: str) -> int | None:
        token_id = self._tokenizer.token_id(text)
        return token_id if token_id in self._tokenizer.special_ids else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _arguments(tool: Mapping[str, Any]) -> GrammarSpec:
    from server.text.grammar import GrammarSpec

    schema = tool["function"].get("parameters")
    return (
        GrammarSpec("json_schema", json.dumps({"type": "object", **schema})) if schema else GrammarSpec("json_object")
    )


def _lark(rules: Sequence[str], parts: Sequence[tuple[str, GrammarSpec]]) -> GrammarSpec:
    from server.text.grammar import GrammarSpec

    return GrammarSpec("lark", "\n".join(rules), tuple(parts))
