"""Sequences spread over a pool in random order, for tests that run the model without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

from server.model.trial import pack
from server.step import StepPlan


class PagedSequences:
    """Takes token sequences through the pool chunk by chunk; blocks come shuffled unless `contiguous`."""

    def __init__(
        self,
        sequences: Sequence[list[int]],
        num_blocks: int,
        block_size: int,
        *,
        contiguous: bool = False,
        num_groups: int = 1,
    ) -> None:
        self.sequences = sequences
        self.done = [0] * len(sequences)
        self._tables: list[list[list[int]]] = [[[] for _ in range(num_groups)] for _ in sequences]
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        if not contiguous:
            random.Random(0).shuffle(self._free)

    def plan(self, chunk_sizes: Sequence[int]) -> tuple[StepPlan, list[tuple[int, int, int]]]:
        """A step over up to so many tokens of each sequence, and (sequence, first, number) of each chunk in it."""
        chunks, parts = [], []
        for index, (tokens, size) in enumerate(zip(self.sequences, chunk_sizes, strict=True)):
            start = self.done[index]
            size = min(size, len(tokens) - start)
            if size == 0:
                continue
            tables = self._tables[index]
            for table in tables:
                while len(table) * self._block_size < start + size:
                    table.append(self._free.pop())
            chunks.append((tokens[start : start + size], start, [list(table) for table in tables]))
            parts.append((index, start, size))
            self.done[index] += size
        return pack(chunks, self._block_size), parts
