"""A conversation as the model was taught to read one: its chat template, rendered and turned into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.text.conversation import adapted
from server.text.formats import reply_format
from server.text.jinja import CompiledTemplate, TemplateFailed
from server.text.literals import LiteralEncoder
from server.text.tokenizer import Tokenizer
from server.text.traits import Traits, find_traits

__all__ = ["ChatTemplate", "NoChatTemplate", "Rendered", "TemplateFailed"]

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_END = "CONTINUE_FINAL_MESSAGE_TAG "  # where a message that is continued ends; the space shows whether it was trimmed


class NoChatTemplate(Exception):
    """The model brings no chat template and the operator names none that can be read. The message says the way out."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as one text and as the prompt's token ids."""

    text: str
    ids: list[int]


class ChatTemplate:
    """Turns messages in OpenAI's form into a prompt. Safe to use from any thread; what it does belongs in a worker.

    template: a file, Jinja source or the name of one of the model's templates; None for the model's default, with its
        template "tool_use" for requests with tools where it has one.
    tool_format: the format of calls where the template does not show the right one.
    source: the Jinja source, of both templates where there are two.
    reply_format: what the replies look like.

    Raises:
        NoChatTemplate: there is none, or it is no Jinja template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None, tool_format: str | None = None) -> None:
        sources = _sources(tokenizer.chat_templates, template)
        self.source = "\n".join(dict.fromkeys(sources))
        self.reply_format = reply_format(self.source, tokenizer, tool_format)
        self._variables = tokenizer.special_token_names
        self._encoder = LiteralEncoder(tokenizer)
        self._plain, self._with_tools = (self._made(source) for source in sources)

    def prepare(self) -> None:
        """Do now what would delay the first conversation in which a special token is written."""
        self._encoder.prepare()

    def _made(self, source: str) -> _Template:
        try:
            compiled = CompiledTemplate(source)
        except TemplateFailed as error:
            raise NoChatTemplate(
                f"its chat template cannot be read ({error}): name another with --chat-template"
            ) from None
        return _Template(compiled, find_traits(lambda messages, tools: self._text(compiled, messages, tools, True, {})))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> Rendered:
        """The prompt for `messages`: no token is added that the template does not write, and the special tokens that
        are written in messages, tools and `kwargs` stay text.

        messages: contents are strings; arguments of calls are objects, or JSON as text.
        tools: as in a request, each {"type": "function", "function": {...}}; None for none.
        continue_final_message: the prompt ends where the last message does, for the model to go on with it.
        kwargs: further variables of the template.

        Raises:
            TemplateFailed: with the reason, fit to be shown to the client.
        """
        for name in kwargs:
            if name in _RESERVED or name in self._variables:
                raise TemplateFailed(f"'chat_template_kwargs' may not set {name!r}, which the server does")
        if not messages:
            raise TemplateFailed("there is no message")
        if continue_final_message and add_generation_prompt:
            raise TemplateFailed("the last message can be continued, or a new one begun, but not both")
        template = self._with_tools if tools else self._plain
        try:
            literals = self._encoder.literals(self.source, messages, tools, kwargs)
        except ValueError as error:
            raise TemplateFailed(str(error)) from None
        hidden = [{**literals.hide(message), "role": message["role"]} for message in messages]
        if continue_final_message:
            hidden[-1]["content"] = (hidden[-1].get("content") or "") + _END
        text = self._text(
            template.compiled,
            adapted(hidden, literals.hide(tools), template.traits, self.reply_format.syntax),
            literals.hide(tools),
            add_generation_prompt,
            literals.hide(kwargs),
        )
        if continue_final_message:
            text = _cut(text)
        try:
            return Rendered(literals.show(text), self._encoder.encode(text, literals))
        except ValueError as error:
            raise TemplateFailed(str(error)) from None

    def _text(
        self,
        template: CompiledTemplate,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        return template.render(
            {
                **self._variables,
                **kwargs,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )


@dataclass(frozen=True, slots=True)
class _Template:
    compiled: CompiledTemplate
    traits: Traits


def _sources(named: Mapping[str, str], template: str | None) -> tuple[str, str]:
    """The sources for requests without and with tools."""
    if template is None:
        if not named:
            raise NoChatTemplate("the model has no chat template: name one with --chat-template")
        if "default" not in named:
            names = ", ".join(sorted(named))
            raise NoChatTemplate(
                f"the model has several chat templates and no default: name one of {names} with --chat-template"
            )
        return named["default"], named.get("tool_use", named["default"])
    if template in named:
        source = named[template]
    elif "{{" in template or "{%" in template:
        source = template
    else:
        try:
            source = Path(template).read_text("utf-8")
        except (OSError, ValueError) as error:
            known = f"none of the model's ({', '.join(sorted(named))})" if named else "no name, as the model has none"
            raise NoChatTemplate(
                f"--chat-template {template!r} is no Jinja source, {known} and no file that can be read ({error})"
            ) from None
    return source, source


def _cut(text: str) -> str:
    """The text up to the end of the message that is continued, without the spaces that the template trimmed there."""
    place = text.rfind(_END.strip())
    if place < 0:
        raise TemplateFailed("the chat template leaves out the last message, which was to be continued")
    return text[:place] if text.startswith(_END, place) else text[:place].rstrip()
