"""The block pool against a naive model: reference counts, states, order of eviction, refusals."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.kvpool.blocks import TRASH_BLOCK, BlockPool, OutOfBlocks


class PoolMachine(RuleBasedStateMachine):
    """Sequences take, share, publish and release blocks; the model is a count a block and a list of the cached ones."""

    @initialize(capacity=st.integers(1, 24))
    def start(self, capacity: int) -> None:
        self.evicted: list[int] = []
        self.pool = BlockPool(capacity, self.evicted.append)
        self.capacity = capacity
        self.sequences: list[list[int]] = []
        self.published: set[int] = set()
        self.cached: list[int] = []  # in the order in which they came to be
        self.evictions = 0

    @property
    def used(self) -> set[int]:
        return {block for sequence in self.sequences for block in sequence}

    @property
    def free(self) -> set[int]:
        return set(range(1, self.capacity + 1)) - self.used - set(self.cached)

    def took(self, got: list[int]) -> None:
        """Check an allocation and the evictions it made."""
        assert len(set(got)) == len(got)
        evicted, self.evicted[:] = list(self.evicted), []
        assert set(got) <= self.free | set(evicted), "a block that somebody holds, or a cached one, was handed out"
        assert evicted == self.cached[: len(evicted)], "not the oldest first"
        assert len(evicted) == max(0, len(got) - len(self.free)), "more was evicted than was needed"
        self.cached = self.cached[len(evicted) :]
        self.published.difference_update(evicted)
        self.evictions += len(evicted)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free) + len(self.cached)))
        got = self.pool.allocate(count)
        assert len(got) == count
        self.took(got)
        self.sequences.append(got)

    @precondition(lambda self: any(self.sequences) and self.free | set(self.cached))
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.sequences if s]))
        count = data.draw(st.integers(1, len(self.free) + len(self.cached)))
        last = sequence[-1]
        was_free = last + 1 in self.free
        got = self.pool.allocate(count, after=last)
        assert len(got) == count
        assert not was_free or got[0] == last + 1, "the next block was free and not taken"
        self.took(got)
        sequence += got

    @rule(extra=st.integers(1, 3))
    def refuse_too_many(self, extra: int) -> None:
        with pytest.raises(OutOfBlocks):
            self.pool.allocate(len(self.free) + len(self.cached) + extra)
        assert not self.evicted, "a refused allocation evicted something"

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.used)))
        self.pool.publish(block)
        self.published.add(block)

    @precondition(lambda self: self.used or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.used | set(self.cached))), unique=True, min_size=1))
        self.pool.acquire(blocks)
        self.cached = [block for block in self.cached if block not in blocks]
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(sequence)
        left = self.used
        self.cached += [block for block in reversed(sequence) if block in self.published and block not in left]
        self.published &= left | set(self.cached)

    @precondition(lambda self: len(self.used) <= self.capacity)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        unheld = sorted({TRASH_BLOCK, *range(1, self.capacity + 1)} - self.used)
        block = data.draw(st.sampled_from(unheld))
        with pytest.raises(ValueError, match=rf"block {block} is released more often"):
            self.pool.release([block])
        with pytest.raises(ValueError, match=rf"block {block} is published but held by nobody"):
            self.pool.publish(block)
        if block not in self.cached:
            with pytest.raises(KeyError):
                self.pool.acquire([block])

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        assert (pool.num_free, pool.num_cached, pool.num_used) == (len(self.free), len(self.cached), len(self.used))
        assert pool.num_free + pool.num_cached + pool.num_used == pool.capacity == self.capacity
        assert pool.num_available == len(self.free) + len(self.cached)
        assert pool.num_evictions == self.evictions
        for block in range(self.capacity + 1):
            assert pool.is_cached(block) == (block in self.cached)
            assert pool.is_published(block) == (block in self.published)
        pool.check_integrity(self.sequences)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_least_recently_released_is_evicted_first_and_a_tail_before_its_head() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, evicted.append)
    first, second = pool.allocate(3), pool.allocate(3)
    for block in (*first, *second):
        pool.publish(block)
    pool.release(first)
    pool.release(second)
    pool.acquire(first)  # used again: now younger than the second
    pool.release(first)
    pool.allocate(6)
    assert evicted == [*reversed(second), *reversed(first)]


def test_a_forgotten_reference_is_found() -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.check_integrity([held])
    for wrong in ([], [held, held], [held[:1]], [[*held, *held]], [[*held, TRASH_BLOCK]], [[*held, 5]]):
        with pytest.raises(AssertionError):
            pool.check_integrity(wrong)


def test_the_trash_block_is_never_handed_out() -> None:
    assert sorted(BlockPool(7).allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
