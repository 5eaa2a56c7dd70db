"""Log-probabilities in the shape of the completions route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.api.wire import LogprobsBody
from server.step import TokenLogprobs

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI sends for a token that is as good as impossible.
LEAST_LOGPROB = -9999.0


class LogprobsWriter:
    """Collects the tokens of one choice. `text_offset` counts characters of the choice's text from its start.

    `top_logprobs` maps strings to log-probabilities, the drawn token always among them. The drawn token stands there
    under the very string it has in `tokens`; another one under its own text, or as `bytes:\\x..` where its bytes are
    no whole character or where its text is taken (two tokens may read the same).

    as_ids: write every token as `token_id:49` instead; `text_offset` still counts the text's characters.
    """

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._offset = 0
        self._body = _empty()

    def add(self, token_id: int, piece: str, logprobs: TokenLogprobs | None) -> None:
        """The next token of the text: `logprobs` is None for the first of an echoed prompt, which has none."""
        body = self._body
        shown = _numbered(token_id) if self._as_ids else piece
        body["tokens"].append(shown)
        body["text_offset"].append(self._offset)
        self._offset += len(piece)
        if logprobs is None:
            body["token_logprobs"].append(None)
            body["top_logprobs"].append(None)
            return
        logprob = max(logprobs.logprob, LEAST_LOGPROB)
        body["token_logprobs"].append(logprob)
        named = {shown: logprob}
        for other_id, other in logprobs.top:
            if other_id != token_id:
                named[self._name(other_id, named)] = max(other, LEAST_LOGPROB)
        body["top_logprobs"].append(named)

    def flush(self) -> LogprobsBody:
        """What was added since the last flush."""
        body, self._body = self._body, _empty()
        return body

    def _name(self, token_id: int, taken: dict[str, float]) -> str:
        if self._as_ids:
            return _numbered(token_id)
        raw = self._tokenizer.token_bytes(token_id)
        if raw is None:
            text = self._tokenizer.decode([token_id], False)
            return text if text not in taken else _numbered(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = _spelled(raw)
        if text in taken:
            text = _spelled(raw)
        return text if text not in taken else _numbered(token_id)


def _numbered(token_id: int) -> str:
    return f"token_id:{token_id}"


def _spelled(raw: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _empty() -> LogprobsBody:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
