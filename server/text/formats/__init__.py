"""How families of models write reasoning and tool calls: telling them apart in a reply, forcing them by grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.text.formats.grammars import ReplyGrammar
from server.text.formats.parser import FirstCall, Reply, names_of
from server.text.formats.reasoning import Tags, find_tags, is_open
from server.text.formats.syntaxes import SYNTAXES, Syntax
from server.text.reply import ReplyParser
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.text.grammar import GrammarSpec

Tool = Mapping[str, Any]
"""A function as in a request: {"type": "function", "function": {"name", "description", "parameters", "strict"}}."""

_SIGNS = (
    ("｜tool▁call", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ("<tool_call>", "hermes"),
)


class ReplyFormat:
    """What the replies of a model look like.

    name: "hermes", "llama3", "mistral", "deepseek" or "json".
    syntax: the markup of its calls.
    marker_ids: special tokens that belong to its markup, to be shown to the parser although others are left out.
    """

    def __init__(self, syntax: Syntax, tags: Tags | None, tokenizer: Tokenizer) -> None:
        self.name: str = syntax.name
        self.syntax = syntax
        self._tags = tags
        self._tokenizer = tokenizer
        markers = (*syntax.markers, *((tags.open, tags.close) if tags is not None else ()))
        self.marker_ids = frozenset(
            token_id for marker in markers if (token_id := tokenizer.token_id(marker)) in tokenizer.special_ids
        )

    def parser(self, prompt_text: str, *, tools: Sequence[Tool]) -> ReplyParser:
        """A parser for one reply.

        prompt_text: the rendered prompt, which may have begun the reasoning already.
        tools: the functions offered; without any, no call is looked for.
        """
        return self._reply(prompt_text, tools)

    def first_call(self, prompt_text: str, *, tools: Sequence[Tool]) -> FirstCall:
        """Tells when one reply has had a call."""
        return FirstCall(self._reply(prompt_text, tools))

    def _reply(self, prompt_text: str, tools: Sequence[Tool]) -> Reply:
        opened = self._tags is not None and is_open(self._tags, prompt_text, self._tokenizer)
        return Reply(self._tags, opened, self.syntax, names_of(tools))

    def call_grammar(self, tools: Sequence[Tool], choice: str | None, parallel: bool, prompt_text: str) -> GrammarSpec:
        """A reply that is nothing but calls, after reasoning where the model reasons.

        choice: the name of the one function to call, None for any of `tools`.
        parallel: whether several calls may follow each other; a named function is called once.
        """
        chosen = [tool for tool in tools if choice is None or tool["function"]["name"] == choice]
        return self._grammar(prompt_text).calls(chosen, parallel and choice is None)

    def strict_grammar(self, tools: Sequence[Tool], parallel: bool, prompt_text: str) -> GrammarSpec | None:
        """A reply of any kind, in which calls follow the schemas of those of `tools` that are "strict", of the others
        being JSON objects. None where no tool is strict.
        """
        if not any(tool["function"].get("strict") for tool in tools):
            return None
        loose = [tool if tool["function"].get("strict") else _without_schema(tool) for tool in tools]
        return self._grammar(prompt_text).text_or_calls(loose, parallel)

    def answer_grammar(self, spec: GrammarSpec, prompt_text: str) -> GrammarSpec:
        """A reply whose answer follows `spec`, after reasoning where the model reasons."""
        return self._grammar(prompt_text).answer(spec)

    def _grammar(self, prompt_text: str) -> ReplyGrammar:
        tags = self._tags
        if tags is None or prompt_text.rstrip().endswith(tags.close):
            return ReplyGrammar(self.syntax, None, False, self._tokenizer)
        return ReplyGrammar(self.syntax, tags, is_open(tags, prompt_text, self._tokenizer), self._tokenizer)


def _without_schema(tool: Tool) -> Tool:
    return {**tool, "function": {**tool["function"], "parameters": None}}


def reply_format(source: str, tokenizer: Tokenizer, override: str | None) -> ReplyFormat:
    """The format of a model whose chat template is `source`.

    override: the name of another format than the one the template shows; None or "auto" for that one.
    """
    name = override if override not in (None, "auto") else _shown_by(source)
    return ReplyFormat(SYNTAXES[name](source), find_tags(source, tokenizer), tokenizer)


def _shown_by(source: str) -> str:
    return next((name for sign, name in _SIGNS if sign in source), "json")
