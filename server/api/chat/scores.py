"""Log-probabilities in the shape of the chat route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.api.chat.wire import ScoreBody, TopScoreBody
from server.api.logprobs import LEAST_LOGPROB
from server.generation import OutputToken

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer


def score(token: OutputToken, tokenizer: Tokenizer, hidden: bool) -> ScoreBody:
    """`token`, which must have log-probabilities. The bytes of all tokens of a reply, joined, are its text.

    hidden: whether the token adds no text, like the one that ends the reply: it has its name, and no bytes.
    """
    logprobs = token.logprobs
    assert logprobs is not None
    name, raw = _spell(token.token_id, tokenizer)
    if raw is None:
        raw = list(token.text.encode())
    return {
        "token": name,
        "logprob": max(logprobs.logprob, LEAST_LOGPROB),
        "bytes": [] if hidden else raw,
        "top_logprobs": [_top(token_id, logprob, tokenizer) for token_id, logprob in logprobs.top],
    }


def _top(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopScoreBody:
    name, raw = _spell(token_id, tokenizer)
    return {"token": name, "logprob": max(logprob, LEAST_LOGPROB), "bytes": raw}


def _spell(token_id: int, tokenizer: Tokenizer) -> tuple[str, list[int] | None]:
    """A token's name and bytes, None where tokens have no bytes of their own."""
    raw = tokenizer.token_bytes(token_id)
    if raw is None:
        return tokenizer.decode([token_id], False), None
    try:
        return raw.decode(), list(raw)
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw), list(raw)
