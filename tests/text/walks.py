"""Texts drawn at random along the masks of a grammar."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from server.step import Constraint, Int64Array
from server.text.tokenizer import Tokenizer

SCHEMAS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "schemas.jsonl").read_text().splitlines()
]
"""Entries with `name`, `schema` and, where it cannot be honoured, a part of the refusal as `refused`."""


def _permitted(constraint: Constraint, vocab_size: int) -> Int64Array:
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    constraint.fill_mask(mask)
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert ids[-1] < vocab_size
    return ids


def permitted(constraint: Constraint, vocab_size: int) -> list[int]:
    ids: list[int] = _permitted(constraint, vocab_size).tolist()
    return ids


class Walker:
    """Walks that come to an end: they like short tokens, and those that close what is open."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.ends = set(eos_token_ids)
        spelled = [tokenizer.token_bytes(token_id) or b"" for token_id in range(vocab_size)]
        self._short = np.array([len(data) <= 2 for data in spelled])
        self._closing = np.array([data in (b'"', b"}", b"]", b'"}', b'",') for data in spelled])

    def walk(self, constraint: Constraint, rng: Random, limit: int = 200) -> str | None:
        """The text, None where it has not ended after `limit` tokens."""
        ids: list[int] = []
        for _ in range(limit):
            choices = _permitted(constraint, self.vocab_size)
            others = np.setdiff1d(choices, list(self.ends), assume_unique=True)
            if len(others) < len(choices) and (rng.random() < 0.5 or not len(others)):
                return self._text(ids)
            for preferred, chance in ((self._closing, 0.3), (self._short, 0.6)):
                liked = others[preferred[others]]
                if len(liked) and rng.random() < chance:
                    others = liked
            ids.append(int(others[rng.randrange(len(others))]))
            constraint.accept(ids[-1])
            if constraint.finished:
                return self._text(ids)
        return None

    def _text(self, ids: list[int]) -> str:
        return b"".join(self.tokenizer.token_bytes(token_id) or b"" for token_id in ids).decode()
