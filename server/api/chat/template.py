"""The chat template in service: the model's own, or the one that the operator names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.api.errors import APIError
from server.config import ServeSettings

if TYPE_CHECKING:
    from server.text.chat_template import ChatTemplate
    from server.text.tokenizer import Tokenizer


def load_template(tokenizer: Tokenizer, settings: ServeSettings) -> ChatTemplate:
    """Takes tens of milliseconds: it belongs in a worker. Raises APIError 400 where there is none to be used."""
    from server.text.chat_template import ChatTemplate, NoChatTemplate

    try:
        return ChatTemplate(tokenizer, settings.chat_template, settings.tool_format)
    except NoChatTemplate as error:
        raise APIError(400, f"This server does not chat: {error}.", code="no_chat_template") from None
