"""A snapshot of the cache as text for people: a character for each block, and a line for each sequence."""

from __future__ import annotations

import string
from collections.abc import Iterator

from server.reports import BlockRuns, CacheSnapshot, GroupSnapshot, SequenceSnapshot

BLOCKS_A_LINE = 64
FREE, CACHED, SHARED, OTHER = ".", "c", "#", "*"
LETTERS = string.ascii_uppercase + string.ascii_lowercase.replace(CACHED, "")
"""For the first sequences that hold blocks; those after them are all `OTHER`."""

_LEGEND = f"{FREE} free   {CACHED} cached   {SHARED} held by several   {OTHER} held by one that has no letter"


def block_map(snapshot: CacheSnapshot) -> str:
    """The whole page. Takes O(blocks)."""
    marks: dict[str, str] = {}
    for sequence in snapshot.sequences:
        if any(sequence.blocks):
            marks[sequence.request_id] = LETTERS[len(marks)] if len(marks) < len(LETTERS) else OTHER
    sequences = [f"{marks.get(sequence.request_id, ' ')} {_describe(sequence)}" for sequence in snapshot.sequences]
    lines = [*_heading(snapshot), "", *_rows(_cells(snapshot, marks)), "", _LEGEND, "", *sequences]
    return "".join(f"{line}\n" for line in lines)


def _heading(snapshot: CacheSnapshot) -> Iterator[str]:
    yield (
        f"{snapshot.capacity_blocks} blocks of {snapshot.block_size} tokens: {snapshot.used_blocks} used, "
        f"{snapshot.cached_blocks} cached, {snapshot.free_blocks} free"
    )
    if len(snapshot.groups) > 1:
        yield f"block tables: {', '.join(map(_reach, snapshot.groups))}"
    if (host := snapshot.host) is not None:
        yield (
            f"host memory: {host.capacity_blocks} blocks, {host.used_blocks} used; {host.saved_blocks} saved, "
            f"{host.loaded_blocks} loaded, {host.evicted_blocks} given up"
        )


def _reach(group: GroupSnapshot) -> str:
    limits = [("window", group.window), ("chunk", group.chunk)]
    return " in ".join(f"{name} of {limit}" for name, limit in limits if limit is not None) or "everything"


def _cells(snapshot: CacheSnapshot, marks: dict[str, str]) -> list[str]:
    """What each block is, block 1 first."""
    cells = [FREE] * snapshot.capacity_blocks
    for block in _blocks(snapshot.cached):
        cells[block - 1] = CACHED
    for sequence in snapshot.sequences:
        for runs in sequence.blocks:
            for block in _blocks(runs):
                cells[block - 1] = marks[sequence.request_id] if cells[block - 1] == FREE else SHARED
    return cells


def _rows(cells: list[str]) -> Iterator[str]:
    width = len(str(len(cells)))
    for start in range(0, len(cells), BLOCKS_A_LINE):
        yield f"{start + 1:>{width}} {''.join(cells[start : start + BLOCKS_A_LINE])}"


def _describe(sequence: SequenceSnapshot) -> str:
    held = "+".join(str(sum(1 for _ in _blocks(runs))) for runs in sequence.blocks)
    return (
        f"{sequence.status:<7} {sequence.request_id}  {sequence.num_tokens} tokens, {sequence.num_computed} computed, "
        f"{sequence.num_evicted} evicted, {held} blocks, {sequence.num_shared} shared"
    )


def _blocks(runs: BlockRuns) -> Iterator[int]:
    for first, last in runs:
        yield from range(first, last + 1)
