"""How the served model is talked to: its chat template, and what its replies look like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.api.errors import APIError
from server.config import ServeSettings

if TYPE_CHECKING:
    from server.text.chat_template import ChatTemplate
    from server.text.formats import ReplyFormat
    from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Dialect:
    template: ChatTemplate
    format: ReplyFormat


def load_dialect(tokenizer: Tokenizer, settings: ServeSettings) -> Dialect:
    """Takes milliseconds: it belongs in a worker. Raises APIError 400 for a model without a template."""
    from server.text.chat_template import ChatTemplate, NoChatTemplate

    try:
        template = ChatTemplate(tokenizer, settings.chat_template, settings.tool_format)
    except NoChatTemplate as error:
        raise APIError(400, f"This model does not chat: {error}.", code="no_chat_template") from None
    return Dialect(template, template.reply_format)
