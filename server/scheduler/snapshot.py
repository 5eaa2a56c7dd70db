"""Who holds which blocks, as plain data that outlives the next step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from server.reports import BlockRuns, CacheSnapshot, GroupSnapshot, SequenceSnapshot
from server.scheduler.cache import Cache
from server.scheduler.request import Request


def cache_snapshot(
    cache: Cache, running: Iterable[Request], ended: Iterable[Request], waiting: Iterable[Request]
) -> CacheSnapshot:
    """`ended`: those that were aborted while the step in progress computes them. Takes O(blocks)."""
    pool = cache.pool
    statuses: list[tuple[Literal["running", "ended", "waiting"], Iterable[Request]]] = [
        ("running", running),
        ("ended", ended),
        ("waiting", waiting),
    ]
    sequences = tuple(
        SequenceSnapshot(
            request_id=request.request_id,
            status=status,
            num_tokens=request.num_tokens,
            num_computed=request.num_computed,
            num_evicted=request.num_evicted if request.tables else 0,  # what was preempted begins anew
            num_shared=sum(pool.is_shared(block) for block in request.blocks),
            blocks=tuple(block_runs(table.blocks) for table in request.tables) or ((),) * len(cache.groups),
        )
        for status, requests in statuses
        for request in requests
    )
    return CacheSnapshot(
        capacity_blocks=pool.capacity,
        block_size=cache.block_size,
        used_blocks=pool.num_used,
        cached_blocks=pool.num_cached,
        free_blocks=pool.num_free,
        groups=tuple(GroupSnapshot(group.window, group.chunk) for group in cache.groups),
        sequences=sequences,
        cached=block_runs(block for block in range(1, pool.capacity + 1) if pool.is_cached(block)),
        host=cache.host_report(),
    )


def block_runs(blocks: Iterable[int]) -> BlockRuns:
    """The blocks in their order, each with those after it that follow by number."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] + 1 == block:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return tuple(runs)
