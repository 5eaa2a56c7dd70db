"""The block table of a sequence: where a group of layers has its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.kvpool.blocks import TRASH_BLOCK
from server.step import Int32Array


class BlockTable:
    """Token t of the cache lies in block `ids[t // block_size]`, where `first <= t // block_size < end`.

    Those before `first` are out of sight and have been given back; the trash block stands in their places.
    """

    __slots__ = ("end", "first", "ids")

    def __init__(self) -> None:
        self.first = 0
        self.end = 0
        self.ids: Int32Array = np.zeros(0, dtype=np.int32)

    @property
    def blocks(self) -> list[int]:
        ids: list[int] = self.ids[self.first : self.end].tolist()
        return ids

    @property
    def last(self) -> int | None:
        """The block that the next one should follow."""
        return int(self.ids[self.end - 1]) if self.end > self.first else None

    def append(self, blocks: Sequence[int]) -> None:
        end = self.end + len(blocks)
        if end > len(self.ids):
            grown = np.full(max(end, 2 * len(self.ids)), TRASH_BLOCK, dtype=np.int32)
            grown[: self.end] = self.ids[: self.end]
            self.ids = grown
        self.ids[self.end : end] = blocks
        self.end = end

    def start_at(self, first: int) -> None:
        """Begin an empty table behind `first` blocks that are out of sight."""
        self.ids = np.full(first, TRASH_BLOCK, dtype=np.int32)
        self.first = self.end = first

    def drop_before(self, first: int) -> list[int]:
        """Let go of the blocks before this one; returns them, to be released."""
        first = min(first, self.end)
        dropped: list[int] = self.ids[self.first : first].tolist()
        self.ids[self.first : first] = TRASH_BLOCK
        self.first = max(self.first, first)
        return dropped

    def drop_from(self, end: int) -> list[int]:
        """Let go of the blocks from this one on; returns them, to be released."""
        dropped: list[int] = self.ids[end : self.end].tolist()
        self.ids[end : self.end] = TRASH_BLOCK
        self.end = end
        return dropped
