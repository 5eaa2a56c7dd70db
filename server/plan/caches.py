"""The ways to keep a model's cache side by side: how many sequences each has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.kvpool.layout import CACHE_DTYPES, CacheDtype
from server.kvpool.shapes import ModelShape
from server.kvpool.sizing import (
    budget_slack,
    longest_sequence,
    most_tokens_held,
    sequence_bytes,
    sequences_that_fit,
)

DEFAULT_BUDGET = 1024
"""The budget that is shown where the lengths exceed it, slack and all, and none is asked for."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of `tokens` tokens fit at once, and what one takes at most."""

    tokens: int
    bytes: int
    sequences: int


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """A way to keep the cache, and how many sequences of each length it has room for.

    dtypes: how numbers are stored, several where they take the same. planned: whether the rest of a plan is about it.
    budget: most tokens of a sequence that stay, chosen by the attention they had (H2O); None keeps all.
    longest: the longest sequence, alone; None where any length fits.
    """

    dtypes: tuple[str, ...]
    budget: int | None
    planned: bool
    bytes_per_token: int
    longest: int | None
    fits: tuple[Fit, ...]


def cache_choices(
    shape: ModelShape,
    own: CacheDtype,
    planned: CacheDtype,
    block_size: int,
    budgets: Sequence[int],
    seq_lens: Sequence[int],
    nbytes: int,
) -> tuple[CacheChoice, ...]:
    """The whole cache, then each budget: in the model's `own` type, in `planned`, and in all that take less than `own`.

    budgets: none where the model takes none. seq_lens: lengths to fit. nbytes: size of the pool.
    """
    choices = []
    for budget in (None, *sorted(set(budgets))):
        for dtypes in _alike(own, planned):
            layout = shape.layout(dtypes[0], block_size, scored=budget is not None)
            fits = tuple(
                Fit(
                    length,
                    sequence_bytes(layout, most_tokens_held(length, budget, block_size)),
                    sequences_that_fit(layout, nbytes, length, budget),
                )
                for length in seq_lens
            )
            choices.append(
                CacheChoice(
                    dtypes=tuple(dtype.name for dtype in dtypes),
                    budget=budget,
                    planned=budget is None and planned in dtypes,
                    bytes_per_token=layout.bytes_per_token,
                    longest=longest_sequence(layout, nbytes, budget),
                    fits=fits,
                )
            )
    return tuple(choices)


def default_budgets(seq_lens: Sequence[int], block_size: int) -> tuple[int, ...]:
    """DEFAULT_BUDGET, where some of the lengths would feel it."""
    return (DEFAULT_BUDGET,) if max(seq_lens) > DEFAULT_BUDGET + budget_slack(DEFAULT_BUDGET, block_size) else ()


def _alike(own: CacheDtype, planned: CacheDtype) -> list[list[CacheDtype]]:
    """Types to compare, those together that take the same; int8 and fp8 differ in what they lose, not in size."""
    smaller: dict[tuple[int, int], list[CacheDtype]] = {}
    for dtype in CACHE_DTYPES.values():
        if dtype.element_bytes < own.element_bytes:
            smaller.setdefault((dtype.element_bytes, dtype.scale_bytes), []).append(dtype)
    groups = [[own], *smaller.values()]
    return groups if any(planned in group for group in groups) else [[planned], *groups]
