"""What a grammar costs: time to compile, to make a mask and to take a token, over the schemas of the tests.

    python -m loadtest.grammars                    the embedded model's vocabulary
    python -m loadtest.grammars DIRECTORY ...      those of other tokenizers

Each schema that can be honoured is followed along random texts (`tests.text.walks`), which are also validated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeVar

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from server.model.embedded import embedded_model
from server.step import Constraint, Int32Array
from server.text.grammar import GrammarCompiler, GrammarError, GrammarSpec
from server.text.tokenizer import Tokenizer
from tests.text.walks import SCHEMAS, Walker

T = TypeVar("T")
WALKS = 4


class Timed:
    """A constraint that notes how long it takes."""

    def __init__(self, constraint: Constraint, masks: list[float], tokens: list[float]) -> None:
        self._constraint = constraint
        self._masks = masks
        self._tokens = tokens

    def fill_mask(self, mask: Int32Array) -> None:
        seconds, _ = timed(lambda: self._constraint.fill_mask(mask))
        self._masks.append(seconds)

    def accept(self, token_id: int) -> None:
        seconds, _ = timed(lambda: self._constraint.accept(token_id))
        self._tokens.append(seconds)

    @property
    def finished(self) -> bool:
        return self._constraint.finished


def timed(function: Callable[[], T]) -> tuple[float, T]:
    begun = time.perf_counter()
    value = function()
    return time.perf_counter() - begun, value


def measure(tokenizer: Tokenizer) -> dict[str, Any]:
    """Counts of schemas, and times in microseconds as [median, 99th percentile, greatest]."""
    eos = tokenizer.eos_token_id
    assert eos is not None, "the walks need an end of text"
    made, compiler = timed(lambda: GrammarCompiler(tokenizer, tokenizer.vocab_size, {eos}))
    walker = Walker(tokenizer, tokenizer.vocab_size, {eos})
    times: dict[str, list[float]] = {"compile": [], "start": [], "mask": [], "token": []}
    refused = wrong = texts = 0
    for entry in SCHEMAS:
        schema = entry["schema"]
        spec = GrammarSpec("json_schema", json.dumps(schema))
        try:
            seconds, grammar = timed(partial(compiler.compile, spec))
        except GrammarError:
            refused += 1
            continue
        times["compile"].append(seconds)
        rules = schema if isinstance(schema, dict) else {}
        kind = validator_for(rules, default=jsonschema.Draft202012Validator)
        for seed in range(WALKS):
            seconds, state = timed(grammar.start)
            times["start"].append(seconds)
            text = walker.walk(Timed(state, times["mask"], times["token"]), Random(f"{entry['name']}{seed}"))
            if text is not None:
                texts += 1
                wrong += not kind(rules, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text))
    return {
        "vocabulary": tokenizer.vocab_size,
        "vocabulary_seconds": round(made, 2),
        "schemas": len(SCHEMAS),
        "refused": refused,
        "texts": texts,
        "wrong": wrong,
        "microseconds": {
            name: [round(1e6 * float(value)) for value in (np.median(all_), np.percentile(all_, 99), max(all_))]
            for name, all_ in times.items()
        },
    }


def main(directories: list[str]) -> None:
    for directory in directories or [str(embedded_model(lambda doing, fraction: None))]:
        print(json.dumps({"tokenizer": directory} | measure(Tokenizer.load(directory)), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
