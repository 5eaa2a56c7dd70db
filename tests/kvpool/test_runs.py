"""Free runs against a plain set of ids, and the contiguity they are there for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.kvpool.runs import FreeRuns


def maximal_runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """The maximal runs of consecutive ids as (first, one past the last), ascending."""
    runs: list[tuple[int, int]] = []
    for block in sorted(ids):
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def count_runs(blocks: list[int]) -> int:
    """Contiguous pieces of a block table, in its order."""
    return sum(1 for index, block in enumerate(blocks) if index == 0 or block != blocks[index - 1] + 1)


class RunsMachine(RuleBasedStateMachine):
    @initialize(first=st.integers(0, 3), count=st.integers(0, 40))
    def start(self, first: int, count: int) -> None:
        self.runs = FreeRuns(first, count)
        self.free = set(range(first, first + count))
        self.taken: list[int] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        after = data.draw(st.none() | (st.sampled_from(self.taken) if self.taken else st.none()))
        lengths = dict(maximal_runs(self.free))
        following = min(count, lengths[after + 1] - after - 1) if after is not None and after + 1 in lengths else 0

        got = self.runs.take(count, after)

        assert len(got) == len(set(got)) == count
        assert self.free.issuperset(got)
        assert got[:following] == list(range((after or 0) + 1, (after or 0) + 1 + following)), "it did not follow on"
        self.free.difference_update(got)
        self.taken += got

    @rule(data=st.data())
    def take_fewest_runs(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        lengths = sorted((end - start for start, end in maximal_runs(self.free)), reverse=True)
        fewest = next(n for n in range(len(lengths) + 1) if sum(lengths[:n]) >= count)

        got = self.runs.take(count)

        assert count_runs(got) == fewest
        self.free.difference_update(got)
        self.taken += got

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.runs.add(block)
        self.free.add(block)

    @invariant()
    def agrees(self) -> None:
        assert len(self.runs) == len(self.free)
        assert self.runs.runs == maximal_runs(self.free)


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_sequence_grows_in_place_beside_another() -> None:
    runs = FreeRuns(1, 64)
    first = runs.take(4)
    second = runs.take(4)
    for _ in range(10):
        first += runs.take(1, after=first[-1])
        second += runs.take(1, after=second[-1])
    assert count_runs(first) == count_runs(second) == 1


def test_an_allocation_larger_than_any_run_takes_the_largest_runs() -> None:
    runs = FreeRuns(0, 20)
    runs.take(20)
    for block in (2, 3, 4, 8, 12, 13, 14, 15):
        runs.add(block)
    assert sorted(runs.take(6)) == [2, 3, 12, 13, 14, 15]


class LowestFirst:
    """The obvious allocator: the lowest free ids."""

    def __init__(self, first: int, count: int) -> None:
        self._free = set(range(first, first + count))

    def add(self, block: int) -> None:
        self._free.add(block)

    def take(self, count: int, after: int | None = None) -> list[int]:
        got = sorted(self._free)[:count]
        self._free.difference_update(got)
        return got


def mean_runs(make: Callable[[int, int], FreeRuns | LowestFirst], *, load: float, seed: int = 0) -> float:
    """Mean contiguous pieces of a sequence while 32 of them grow token by token and are replaced as they end."""
    rng = random.Random(seed)
    allocator = make(1, 1024)

    def begin() -> tuple[list[int], int]:
        length = rng.randint(8, int(64 * load) - 8)
        return allocator.take(rng.randint(1, length)), length

    sequences = [begin() for _ in range(32)]
    pieces = samples = 0
    for _ in range(2000):
        index = rng.randrange(32)
        blocks, length = sequences[index]
        if len(blocks) == length:
            for block in reversed(blocks):
                allocator.add(block)
            sequences[index] = begin()
        else:
            blocks += allocator.take(1, after=blocks[-1])
        pieces += sum(count_runs(blocks) for blocks, _ in sequences)
        samples += 32
    return pieces / samples


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_growing_sequences_stay_in_fewer_pieces_than_with_the_lowest_free_ids(load: float) -> None:
    ours = mean_runs(FreeRuns, load=load)
    lowest_first = mean_runs(LowestFirst, load=load)
    print(f"mean runs a sequence at load {load}: {ours:.2f}, lowest id first {lowest_first:.2f}")
    assert ours < lowest_first / 2
