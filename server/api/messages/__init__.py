"""POST /v1/messages: Anthropic's interface as a translation of chat."""
