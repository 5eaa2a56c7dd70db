"""Which blocks of host memory hold what: the second tier of the prefix cache.

A block that the pool gives up is copied to a host block, if there is one, and found there by the next sequence that
begins the same. It stays there when it has been copied back, so that giving it up again costs nothing. When host memory
is full, what was used longest ago is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class HostTier(Generic[T]):
    """Host blocks 0 to `capacity - 1` and what each holds. `on_evict(held)` is told what has been forgotten.

    Blocks that the copies of a step read or write are pinned until the step is over: they are neither forgotten nor
    written to again.
    """

    def __init__(self, capacity: int, on_evict: Callable[[T], None]) -> None:
        self.capacity = capacity
        self.num_saved = 0
        self.num_loaded = 0
        self.num_evicted = 0
        self._on_evict = on_evict
        self._free = list(range(capacity - 1, -1, -1))
        self._held: OrderedDict[int, T] = OrderedDict()  # least recently used first
        self._pinned: set[int] = set()

    @property
    def num_used(self) -> int:
        return len(self._held)

    def save(self, held: T) -> int | None:
        """A block to copy `held` to, pinned; None where all blocks are."""
        if not self._free:
            if len(self._pinned) == len(self._held):
                return None  # found without looking at each of them, for each of many
            oldest = next(block for block in self._held if block not in self._pinned)
            self._on_evict(self._held.pop(oldest))
            self.num_evicted += 1
            self._free.append(oldest)
        block = self._free.pop()
        self._held[block] = held
        self._pinned.add(block)
        self.num_saved += 1
        return block

    def touch(self, block: int) -> None:
        """What the block holds was in use until now: it is the most recently used."""
        self._held.move_to_end(block)

    def load(self, block: int) -> None:
        """The block is copied back in this step."""
        self.touch(block)
        self._pinned.add(block)
        self.num_loaded += 1

    def unpin(self) -> None:
        """The copies of the last step are done."""
        self._pinned.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert len(self._free) + len(self._held) == self.capacity, "a host block is lost, or held twice"
        assert not set(self._free) & self._held.keys(), "a host block is free and holds something"
        assert self._pinned <= self._held.keys(), "a free host block is pinned"
