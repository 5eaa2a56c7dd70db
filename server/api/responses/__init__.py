"""POST /v1/responses: OpenAI's newer interface as a translation of chat, without a memory of its own."""
