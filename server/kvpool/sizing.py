"""What fits: how many tokens and sequences a memory holds, and what an allocator wastes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.kvpool.layout import CacheLayout


def usable_blocks(layout: CacheLayout, nbytes: int) -> int:
    """Blocks for sequences in a pool of `nbytes`: one block is the trash block and holds no sequence."""
    return max(0, nbytes // layout.bytes_per_block - 1)


def tokens_that_fit(layout: CacheLayout, nbytes: int) -> int:
    """Most tokens that a pool of `nbytes` holds, every block full, where all layers see all of them."""
    return usable_blocks(layout, nbytes) // len(layout.groups) * layout.block_size


def sequences_that_fit(layout: CacheLayout, nbytes: int, length: int) -> int:
    """How many sequences of `length` tokens a pool of `nbytes` holds at once, sharing nothing."""
    return usable_blocks(layout, nbytes) // layout.blocks_for(length)


def budget_slack(budget: int, block_size: int) -> int:
    """Tokens beyond its budget that a sequence takes into its cache before it gives them up again, in whole blocks.

    A quarter of the budget, at least four blocks: what stays is copied once in so many tokens, and the sequence never
    holds more than `budget + slack` of them.
    """
    return max(4, -(-budget // (4 * block_size))) * block_size


def most_tokens_held(length: int, budget: int | None, block_size: int) -> int:
    """Most tokens that the cache holds at a time of a sequence that grows to `length`; a budget of None is no limit."""
    return length if budget is None else min(length, budget + budget_slack(budget, block_size))


@dataclass(frozen=True, slots=True)
class Allocation:
    """What an allocator takes to hold given sequences at their full lengths.

    used_bytes: of tokens that exist; allocated_bytes: what is taken for them; at_once: how many such sequences the
    memory holds at a time, at their mean size.
    """

    used_bytes: int
    allocated_bytes: int
    at_once: int

    @property
    def wasted_bytes(self) -> int:
        return self.allocated_bytes - self.used_bytes

    @property
    def waste_ratio(self) -> float:
        """Share of the allocated bytes that hold nothing, 0 to 1."""
        return self.wasted_bytes / self.allocated_bytes


def reserve_maximum(layout: CacheLayout, lengths: Sequence[int], max_length: int, nbytes: int) -> Allocation:
    """One slab of `max_length` tokens for each sequence, as a static cache takes it. No length may exceed it."""
    _check(lengths)
    if max(lengths) > max_length:
        raise ValueError(f"a sequence of {max(lengths):,} tokens is longer than the {max_length:,} to reserve")
    slab = max_length * layout.bytes_per_token
    return Allocation(sum(lengths) * layout.bytes_per_token, len(lengths) * slab, nbytes // slab)


def paged(layout: CacheLayout, lengths: Sequence[int], nbytes: int) -> Allocation:
    """Whole blocks as sequences grow into them: only the last block of each can be part empty."""
    _check(lengths)
    blocks = sum(layout.blocks_for(length) for length in lengths)
    at_once = usable_blocks(layout, nbytes) * len(lengths) // blocks
    return Allocation(sum(lengths) * layout.bytes_per_token, blocks * layout.bytes_per_block, at_once)


def _check(lengths: Sequence[int]) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must be whole numbers of at least 1 token, at least one of them")
