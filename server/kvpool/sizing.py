"""What fits: how many tokens and sequences a memory holds, and what an allocator wastes of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.kvpool.layout import EVERYTHING, CacheLayout


def usable_blocks(layout: CacheLayout, nbytes: int) -> int:
    """Blocks for sequences in a pool of `nbytes`: one block is the trash block and holds no sequence."""
    return max(0, nbytes // layout.bytes_per_block - 1)


def tokens_that_fit(layout: CacheLayout, nbytes: int) -> int:
    """Most tokens that a pool of `nbytes` holds, every block full, where all layers see all of them."""
    return usable_blocks(layout, nbytes) // len(layout.groups) * layout.block_size


def sequences_that_fit(layout: CacheLayout, nbytes: int, length: int, budget: int | None = None) -> int:
    """How many sequences of `length` tokens a pool of `nbytes` holds at once, sharing nothing.

    budget: most tokens of each that stay in its cache, None for all.
    """
    return usable_blocks(layout, nbytes) // layout.blocks_for(most_tokens_held(length, budget, layout.block_size))


def longest_sequence(layout: CacheLayout, nbytes: int, budget: int | None = None) -> int | None:
    """Length of the longest sequence that a pool of `nbytes` holds, alone; None where any length fits."""

    def held(length: int) -> int:
        return layout.blocks_for(most_tokens_held(length, budget, layout.block_size))

    return longest_within(usable_blocks(layout, nbytes), layout.block_size, held)


def longest_within(num_blocks: int, block_size: int, blocks_for: Callable[[int], int]) -> int | None:
    """Length of the longest sequence that `num_blocks` blocks hold; None where any length fits.

    blocks_for: most blocks that a sequence of so many tokens holds at a time. It never falls.
    """
    too_long = num_blocks * block_size + 1
    if blocks_for(too_long) <= num_blocks:  # it gives blocks up, and holds no more however long it is
        return None
    return bisect_right(range(too_long), num_blocks, key=blocks_for) - 1


def sequence_bytes(layout: CacheLayout, length: int) -> int:
    """Bytes of the blocks that a sequence of `length` tokens takes, those out of every layer's sight given back."""
    return layout.blocks_for(length) * layout.bytes_per_block


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

    used_bytes: of tokens that some layer may still look at; allocated_bytes: what is taken for them; at_once: how many
    such sequences the memory holds at a time, at their mean size.
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
    """One slab of `max_length` tokens for each sequence, as a static cache takes it. No length may exceed it.

    In layers with a window the slab is as long as the window, which such caches wrap around in.
    """
    _check(lengths)
    if max(lengths) > max_length:
        raise ValueError(f"a sequence of {max(lengths):,} tokens is longer than the {max_length:,} to reserve")
    slab = _visible_bytes(layout, max_length)
    used = sum(_visible_bytes(layout, length) for length in lengths)
    return Allocation(used, len(lengths) * slab, nbytes // slab)


def paged(layout: CacheLayout, lengths: Sequence[int], nbytes: int) -> Allocation:
    """Whole blocks as sequences grow into them, and out of them where all layers of a group have windows.

    Only the last block of each can be part empty, and the first that a window still touches; the last group of a kind
    may have fewer layers than a block has places.
    """
    _check(lengths)
    blocks = sum(layout.blocks_for(length) for length in lengths)
    at_once = usable_blocks(layout, nbytes) * len(lengths) // blocks
    used = sum(_visible_bytes(layout, length) for length in lengths)
    return Allocation(used, blocks * layout.bytes_per_block, at_once)


def _visible_bytes(layout: CacheLayout, length: int) -> int:
    """Bytes of what the layers see at most of a sequence as it grows to `length`."""
    visibilities = layout.visibilities or (EVERYTHING,) * len(layout.layers)
    return sum(
        layer.bytes_per_token(layout.dtype, layout.scored) * min(length, visibility.reach or length)
        for layer, visibility in zip(layout.layers, visibilities, strict=True)
    )


def _check(lengths: Sequence[int]) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must be whole numbers of at least 1 token, at least one of them")
