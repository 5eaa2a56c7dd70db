"""The grammar that a chat's reply follows, put together from what the body says about answers and about calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from server.api.chat.tools import Named, ToolChoice
from server.api.errors import invalid
from server.api.structure import Structure

if TYPE_CHECKING:
    from server.text.formats import ReplyFormat


def reply_structure(
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    parallel: bool,
    answer: Structure | None,
    reply_format: ReplyFormat,
    prompt_text: str,
) -> Structure | None:
    """What the whole reply is to be, None where it is free.

    A forced call leaves no room for an answer, so that what `answer` says of one has nothing to act upon. Where calls
    are free, a reply is either calls, all according to their schemas, or an answer as `answer` has it; and without
    `answer` it is bound as far as a tool is "strict".

    parallel: whether a reply may hold several calls.
    answer: what the body asks of an answer.
    prompt_text: the rendered prompt, which may have begun the reasoning.

    Raises APIError 400 where an answer of this kind cannot be told from calls.
    """
    from server.text.grammar import GrammarSpec

    if isinstance(choice, Named):
        return Structure(reply_format.call_grammar(tools, choice.name, parallel, prompt_text), "tools")
    if choice == "required":
        return Structure(reply_format.call_grammar(tools, None, parallel, prompt_text), "tools")
    if answer is None:
        strict = reply_format.strict_grammar(tools, parallel, prompt_text) if tools else None
        return Structure(strict, "tools") if strict is not None else None
    spec = reply_format.answer_grammar(answer.spec, prompt_text)
    if tools:
        syntax = reply_format.syntax
        if (syntax.begin + syntax.around("")[0]).startswith("{"):
            # The matcher does not look back from within a brace: it would permit calls alone.
            message = "this model writes calls as bare JSON, which cannot be told from an answer that is JSON"
            raise invalid(
                answer.param, f"'{answer.param}' with 'tools': {message}. Set 'tool_choice' to none or required."
            )
        calls = reply_format.call_grammar(tools, None, parallel, prompt_text)
        either = (("reply_answer", spec), ("reply_calls", calls))
        spec = GrammarSpec("lark", "start: @reply_answer | @reply_calls", either)
    return Structure(spec, answer.param)
