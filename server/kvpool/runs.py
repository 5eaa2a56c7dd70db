"""Free block ids kept as maximal runs of consecutive ids, so that a sequence's blocks stay next to each other.

Contiguity costs nothing, and a kernel that reads the pool through views (prompts, and half precision, on a CPU) takes
one call for each run. A growing sequence therefore takes the id after its last one when that is free, and a sequence
that must start a run somewhere else starts it in the middle of the largest free run, which leaves whoever ends before
that run room to grow.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRuns:
    """A set of free ids with allocation by runs. Every operation is O(log runs) plus a list insertion."""

    def __init__(self, first: int, count: int) -> None:
        self._end: dict[int, int] = {}  # first id of a run -> one past its last
        self._start: dict[int, int] = {}  # one past the last id of a run -> its first
        self._by_length: list[tuple[int, int]] = []  # (length, first id), ascending
        self._count = 0
        self._first = first
        if count:
            self._insert(first, first + count)

    def __len__(self) -> int:
        return self._count

    @property
    def runs(self) -> list[tuple[int, int]]:
        """All runs as (first, one past the last), ascending."""
        return sorted(self._end.items())

    def add(self, block: int) -> None:
        """Give one id back; it must not be free already."""
        start, end = block, block + 1
        if block in self._start:
            start = self._start[block]
            self._remove(start, block)
        if end in self._end:
            right_end = self._end[end]
            self._remove(end, right_end)
            end = right_end
        self._insert(start, end)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` ids, following `after` where possible and in as few runs as possible. There must be enough."""
        taken: list[int] = []
        if after is not None and after + 1 in self._end:
            taken += self._carve(after + 1, after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            length, start = self._by_length[-1]
            # Nothing grows into the first run from below, so only runs behind another sequence are split in the middle.
            offset = max(0, length - missing) // 2 if start != self._first else 0
            taken += self._carve(start, start + offset, missing)
        return taken

    def _carve(self, run: int, at: int, count: int) -> list[int]:
        """Take up to `count` ids from `at` on out of the run that starts at `run`."""
        end = self._end[run]
        stop = min(at + count, end)
        self._remove(run, end)
        if run < at:
            self._insert(run, at)
        if stop < end:
            self._insert(stop, end)
        return list(range(at, stop))

    def _insert(self, start: int, end: int) -> None:
        self._end[start] = end
        self._start[end] = start
        insort(self._by_length, (end - start, start))
        self._count += end - start

    def _remove(self, start: int, end: int) -> None:
        del self._end[start], self._start[end]
        del self._by_length[bisect_left(self._by_length, (end - start, start))]
        self._count -= end - start
