"""What the metrics show of the cache is what the steps' plans had the device write, drop and copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from server.kvpool.layout import EVERYTHING, Visibility
from server.scheduler.budget import Budget
from server.scheduler.request import Request
from server.scheduler.scheduler import Scheduler, SchedulerConfig
from server.step import SamplingParams, StepPlan, StepResult

SIZE = 4
SHAPES: dict[str, tuple[tuple[Visibility, ...], int, Budget | None]] = {
    "one table": ((EVERYTHING,), 0, None),
    "windows": ((EVERYTHING, Visibility(window=9), Visibility(window=9)), 0, None),
    "all windows": ((Visibility(window=6),), 0, None),
    "host memory": ((EVERYTHING,), 12, None),
    "windows and host memory": ((EVERYTHING, Visibility(window=9)), 30, None),
    "heavy hitters": ((EVERYTHING,), 12, Budget(10, 8, "h2o")),
    "newest": ((EVERYTHING,), 0, Budget(8, 16, "window")),
}
"""Table groups, blocks of host memory, the budget of every other request."""


class Device:
    """Knows of the cache only what the plans say: which slots of each block of the pool hold something."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.filled: dict[int, set[int]] = {}
        self.dropped: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        self.saved = self.loaded = 0
        self._pool = scheduler.pool
        allocate = scheduler.pool.allocate

        def watched(count: int, after: int | None = None) -> list[int]:
            blocks = allocate(count, after)
            self.filled |= {block: set() for block in blocks}
            return blocks

        scheduler.pool.allocate = watched

    def run(self, plan: StepPlan) -> StepResult:
        self.saved += len(plan.saves)
        for _, block in plan.loads:
            self.loaded += 1
            self.filled[block] = set(range(SIZE))
        for compaction in plan.compactions:
            for index, block in enumerate(compaction.block_table.tolist()):
                left = {place for place in self.filled[block] if index * SIZE + place < compaction.keep}
                self.filled[block] = left
            self.kept[compaction.policy] += compaction.keep
            self.dropped[compaction.policy] += compaction.length - compaction.keep
        for slot in plan.slots.ravel().tolist():
            self.filled[slot // SIZE].add(slot % SIZE)
        drawn = len(plan.sample_rows)
        return StepResult(np.full(drawn, 3), (None,) * drawn, ())

    def unused_share(self) -> float:
        """Of the slots in blocks that requests hold."""
        used = [
            len(places)
            for block, places in self.filled.items()
            if self._pool._references[block] and not self._pool.is_cached(block)
        ]
        assert len(used) == self._pool.num_used
        return 1 - sum(used) / (len(used) * SIZE) if used else 0.0


def steps(scheduler: Scheduler, device: Device) -> Iterator[None]:
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(device.run(plan), plan)
        yield


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is(shape: str) -> None:
    groups, host, budget = SHAPES[shape]
    scheduler = Scheduler(SchedulerConfig(SIZE, 40, 4, 12, groups=groups, num_host_blocks=host))
    device = Device(scheduler)
    for number in range(16):
        prompt = [number % 3] * 10 + [number] * (number % 5)
        scheduler.add(Request(f"r{number}", prompt, SamplingParams(), 30, budget=budget if number % 2 else None))
    shares = []
    for _ in steps(scheduler, device):
        stats = scheduler.stats()
        share = stats.unused_slots / (stats.blocks_used * SIZE) if stats.blocks_used else 0.0
        assert share == pytest.approx(device.unused_share())
        shares.append(share)
        assert (stats.kept_tokens, stats.dropped_tokens) == (device.kept, device.dropped)
        copied = (0, 0) if stats.host is None else (stats.host.saved_blocks, stats.host.loaded_blocks)
        assert copied == (device.saved, device.loaded)
    assert 0 < max(shares) < 1
    stats = scheduler.stats()
    policies = {budget.policy} if budget else set()
    assert set(stats.dropped_tokens) == policies
    for policy in policies:
        assert stats.evicted_by[policy] == stats.dropped_tokens[policy] // SIZE > 0
    assert (stats.evicted_by.get("sliding_window", 0) > 0) == any(group.reach for group in groups)
    assert (device.saved > 0) == (host > 0)
