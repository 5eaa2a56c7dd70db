"""Texts drawn at random along the masks of a grammar."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from server.step import Constraint
from server.text.tokenizer import Tokenizer

SCHEMAS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "schemas.jsonl").read_text().splitlines()
]
"""Entries with `name`, `schema` and, where it cannot be honoured, a part of the refusal as `refused`."""


def permitted(constraint: Constraint, vocab_size: int) -> list[int]:
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    constraint.fill_mask(mask)
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert all(token_id < vocab_size for token_id in ids)
    return ids


class Walker:
    """Walks that come to an end: they like short tokens, and those that close what is open."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.ends = set(eos_token_ids)
        spelled = [tokenizer.token_bytes(token_id) or b"" for token_id in range(vocab_size)]
        self._short = {token_id for token_id, data in enumerate(spelled) if len(data) <= 2}
        self._closing = {token_id for token_id, data in enumerate(spelled) if data in (b'"', b"}", b"]", b'"}', b'",')}

    def walk(self, constraint: Constraint, rng: Random, limit: int = 200) -> str | None:
        """The text, None where it has not ended after `limit` tokens."""
        ids: list[int] = []
        for _ in range(limit):
            choices = permitted(constraint, self.vocab_size)
            if self.ends & set(choices) and (rng.random() < 0.5 or self.ends >= set(choices)):
                return self._text(ids)
            choices = [token_id for token_id in choices if token_id not in self.ends]
            for preferred, chance in ((self._closing, 0.3), (self._short, 0.6)):
                liked = [token_id for token_id in choices if token_id in preferred]
                if liked and rng.random() < chance:
                    choices = liked
            ids.append(rng.choice(choices))
            constraint.accept(ids[-1])
            if constraint.finished:
                return self._text(ids)
        return None

    def _text(self, ids: list[int]) -> str:
        return b"".join(self.tokenizer.token_bytes(token_id) or b"" for token_id in ids).decode()
