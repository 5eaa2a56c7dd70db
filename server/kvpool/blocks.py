"""The accounting of the KV pool: which block is free, which is kept for its contents and who holds the rest.

A block is in exactly one state, and `free + cached + used == capacity` always:

    free    holds nothing anyone wants
    cached  held by no sequence, but its contents are published; reclaimed least recently used first
    used    held by one or more sequences (its reference count)

Block 0 is the trash block: padding is written there, nobody owns it, it is not part of the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from server.kvpool.runs import FreeRuns

TRASH_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than are free or reclaimable; callers check `num_available` first."""


class BlockPool:
    """Reference-counted blocks with ids 1 to `capacity`.

    `on_evict(block)` is called when a cached block is reclaimed, before its id is handed out again.
    """

    def __init__(self, capacity: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        self.capacity = capacity
        self.on_evict = on_evict
        self.num_evictions = 0
        self._references = [0] * (capacity + 1)
        self._published: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._free = FreeRuns(TRASH_BLOCK + 1, capacity)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: the free ones and those that are only cached."""
        return self.num_free + self.num_cached

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept only for its contents, so that acquiring it takes it from the available ones."""
        return block in self._cached

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence holds the block."""
        return self._references[block] > 1

    def is_published(self, block: int) -> bool:
        """Whether the block's contents outlive its holders."""
        return block in self._published

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` blocks with one reference each, next to block `after` where possible.

        Raises OutOfBlocks, and takes nothing, when there are not as many.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} of {self.capacity} available")
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            self._published.discard(block)
            self.num_evictions += 1
            self.on_evict(block)
            self._free.add(block)
        blocks = self._free.take(count, after)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that are used or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block of a sequence, its last block first.

        The tail of a prefix is thereby older than its head, so eviction never strands the end of a chain.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._published:
                    self._cached[block] = None
                else:
                    self._free.add(block)

    def publish(self, block: int) -> None:
        """Keep the block's contents when its last holder leaves. Only a used block can be published."""
        if self._references[block] <= 0:
            raise ValueError(f"block {block} is published but held by nobody")
        self._published.add(block)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Check every invariant against the block lists of all holders; AssertionError names the first broken one.

        O(capacity); may be called between any two operations.
        """
        counted = [0] * (self.capacity + 1)
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a sequence lists a block twice: {list(blocks)}"
            for block in blocks:
                assert 0 < block <= self.capacity, f"block {block} is the trash block or outside the pool"
                counted[block] += 1
        assert counted == self._references, "reference counts differ from the sequences that list the blocks"
        free = {block for start, end in self._free.runs for block in range(start, end)}
        cached = set(self._cached)
        used = {block for block, count in enumerate(self._references) if count}
        assert len(free) == self.num_free, "free runs overlap"
        assert len(free | cached | used) == len(free) + len(cached) + len(used), "a block has two states"
        assert len(free) + len(cached) + len(used) == self.capacity, "a block has no state"
        assert self._published == cached | (self._published & used), (
            "a published block is free, or a cached one unpublished"
        )
