"""A conversation as the model was taught to read one: its chat template, rendered and turned into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.text.jinja import CompiledTemplate, TemplateFailed
from server.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "NoChatTemplate", "Rendered", "TemplateFailed"]

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class NoChatTemplate(Exception):
    """The model brings no chat template and the operator names none. The message says how to name one."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as one text and as the prompt's token ids."""

    text: str
    ids: list[int]


class ChatTemplate:
    """Turns messages in OpenAI's form into a prompt. Safe to use from any thread; what it does belongs in a worker.

    template: Jinja source or the name of one of the model's templates; None for the model's default.
    source: the template's source.

    Raises:
        NoChatTemplate: there is none.
        TemplateFailed: it is no Jinja template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        named = tokenizer.chat_templates
        if template is None and not named:
            raise NoChatTemplate("the model has no chat template: start the server with --chat-template FILE")
        self._tokenizer = tokenizer
        self._variables = tokenizer.special_token_names
        self.source = named["default"] if template is None else named.get(template, template)
        self._compiled = CompiledTemplate(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> Rendered:
        """The prompt for `messages`: no token is added that the template does not write.

        tools: as in a request, each {"type": "function", "function": {...}}; None for none.
        kwargs: further variables of the template.

        Raises:
            TemplateFailed: with the reason, fit to be shown to the client.
        """
        taken = sorted(name for name in kwargs if name in RESERVED or name in self._variables)
        if taken:
            raise TemplateFailed(f"chat_template_kwargs may not set '{taken[0]}'")
        text = self._compiled.render(
            {
                **self._variables,
                **kwargs,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return Rendered(text, self._tokenizer.encode(text, add_special_tokens=False))
