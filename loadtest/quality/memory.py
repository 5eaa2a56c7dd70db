"""How much each choice stores, by the formula that the pool is laid out with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loadtest.quality.choices import Choice
from server.bench.report import align
from server.kvpool.layout import CACHE_DTYPES, CacheLayout
from server.kvpool.sizing import sequences_that_fit, tokens_that_fit


def memory_table(layout: CacheLayout, choices: Sequence[Choice], length: int, nbytes: int) -> str:
    """layout: of the model, with any numbers. length: of the sequences that are counted. nbytes: of the pool."""
    size = f"{nbytes / 2**20:,.0f} MiB"
    rows = [["cache", "B a token", f"tokens in {size}", "tokens held", "a sequence, MiB", f"sequences in {size}"]]
    for choice in choices:
        own = replace(layout, dtype=CACHE_DTYPES[choice.dtype], scored=choice.policy == "h2o")
        held = choice.most_held(length)
        rows.append(
            [
                choice.name,
                f"{own.bytes_per_token:,}",
                f"{tokens_that_fit(own, nbytes):,}",
                f"{held:,}",
                f"{own.blocks_for(held) * own.bytes_per_block / 2**20:.1f}",
                f"{sequences_that_fit(own, nbytes, length, choice.keep(length)):,}",
            ]
        )
    return align(rows)
