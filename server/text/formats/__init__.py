"""How families of models write reasoning and tool calls: telling them apart in a reply, forcing them by grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from server.text.reply import Content, Part, ReplyParser
from server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from server.text.grammar import GrammarSpec

Tool = Mapping[str, Any]
"""A function as in a request: {"type": "function", "function": {"name", "description", "parameters", "strict"}}."""


class ReplyFormat:
    """What the replies of a model look like.

    name: "hermes", "llama3", "mistral", "deepseek" or "json".
    marker_ids: special tokens that belong to its markup, to be shown to the parser although others are left out.
    """

    def __init__(self, name: str, marker_ids: frozenset[int]) -> None:
        self.name = name
        self.marker_ids = marker_ids

    def parser(self, prompt_text: str, *, tools: Sequence[Tool]) -> ReplyParser:
        """A parser for one reply.

        prompt_text: the rendered prompt, which may have begun the reasoning already.
        tools: the functions offered; without any, no call is looked for.
        """
        return _Plain()

    def call_grammar(self, tools: Sequence[Tool], choice: str | None, parallel: bool, prompt_text: str) -> GrammarSpec:
        """A reply that is nothing but calls, after reasoning where the model reasons.

        choice: the name of the one function to call, None for any of `tools`.
        parallel: whether several calls may follow each other.
        """
        raise NotImplementedError

    def answer_grammar(self, spec: GrammarSpec, prompt_text: str) -> GrammarSpec:
        """A reply whose answer follows `spec`, after reasoning where the model reasons."""
        return spec


FormatName = Literal["auto", "hermes", "llama3", "mistral", "deepseek", "json"]


def reply_format(source: str, tokenizer: Tokenizer, override: str | None) -> ReplyFormat:
    """The format of a model whose chat template is `source`; `override` names another than the one found there."""
    return ReplyFormat(override or "json", frozenset())


class _Plain:
    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []
