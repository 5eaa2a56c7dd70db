"""What attention needs to know of a step, in the forms that backends read, and the batching they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.kvpool.layout import Visibility
from server.kvpool.tensors import KVTensors
from server.step import Int32Array, Int64Array

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class StepMetadata:
    """One step's sequences, as the layers of one table group see them: where their tokens lie in the pack, where their
    keys lie in the pool.

    slots [T], positions [T], context_lens [B] and block_tables [B, widest] are int64 on the device. query_starts
    [B + 1] and the `host_` twins are on the host, so that work is planned without waiting for the device. Query i of a
    sequence's n sits at cache index `context_len - n + i`.

    observed: bool [B] on the host, sequences whose attention is added to `pool.scores`; None when there are none.
    """

    pool: KVTensors
    slots: Tensor
    positions: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_starts: Int32Array
    host_context_lens: Int32Array
    host_block_tables: Int32Array
    observed: npt.NDArray[np.bool_] | None = None
    _plans: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, computed by the first layer that asks for `key` in this step and kept for the others."""
        if key not in self._plans:
            self._plans[key] = make()
        plan: T = self._plans[key]
        return plan

    @property
    def observed_rows(self) -> npt.NDArray[np.bool_]:
        """bool [B], `observed` where it is None, too."""
        return np.zeros(len(self.host_context_lens), dtype=np.bool_) if self.observed is None else self.observed

    @property
    def query_lens(self) -> Int32Array:
        return np.diff(self.query_starts)

    def first_visible(self, rows: Int64Array, visibility: Visibility) -> Int64Array:
        """[len(rows)], the first cache index that each row's first query sees."""
        queries = (self.host_context_lens - self.query_lens)[rows]
        return np.array([visibility.first(query) for query in queries.tolist()], dtype=np.int64)

    def slots_of(self, row: int, start: int, stop: int) -> Tensor:
        """Slots [stop - start] of a row's cache indices `start` to `stop`, on the device."""
        index = torch.arange(start, stop, device=self.slots.device)
        return self.block_tables[row, index // self.block_size] * self.block_size + index % self.block_size

    @property
    def block_size(self) -> int:
        return self.pool.block_size


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Single-query rows of similar length, padded to the longest.

    rows: [n] index into the sequences. queries: [n] index into the packed tokens.
    slots: [n * width], padded with the row's own newest slot, which is always written and never another request's.
    padding: [n, width], True where padded.
    observed: [m], which of the n rows are observed; None when there are none.
    """

    rows: Tensor
    queries: Tensor
    slots: Tensor
    padding: Tensor
    observed: Tensor | None

    @property
    def width(self) -> int:
        return self.padding.shape[1]


def make_buckets(
    step: StepMetadata, rows: Int64Array, visibility: Visibility, max_slots: int, fill: float
) -> list[Bucket]:
    """Group single-query rows, longest first, so that no bucket gathers more than about `max_slots` slots.

    fill: shortest row of a bucket relative to its longest; higher means less padding and more buckets.
    """
    first = step.first_visible(rows, visibility)
    lengths = step.host_context_lens[rows] - first
    order = np.argsort(-lengths, kind="stable")
    buckets = []
    start = 0
    while start < len(order):
        width = int(lengths[order[start]])
        stop = start + 1
        limit = start + max(1, max_slots // width)
        while stop < min(limit, len(order)) and lengths[order[stop]] >= fill * width:
            stop += 1
        members = order[start:stop]
        buckets.append(_make_bucket(step, rows[members], first[members], width))
        start = stop
    return buckets


def _make_bucket(step: StepMetadata, rows: Int64Array, first: Int64Array, width: int) -> Bucket:
    host = torch.from_numpy(np.stack((rows, step.query_starts[rows].astype(np.int64), first)))
    row_ids, queries, starts = host.to(step.slots.device, non_blocking=True)
    newest = step.context_lens[row_ids, None] - 1
    index = starts[:, None] + torch.arange(width, device=newest.device)
    padding = index > newest
    index = torch.minimum(index, newest)
    blocks = step.block_tables[row_ids].gather(1, index // step.block_size)
    slots = blocks * step.block_size + index % step.block_size
    return Bucket(row_ids, queries, slots.flatten(), padding, _observed_of(step, rows))


def _observed_of(step: StepMetadata, rows: Int64Array) -> Tensor | None:
    observed = np.flatnonzero(step.observed_rows[rows])
    if not len(observed):
        return None
    return torch.from_numpy(observed).to(step.slots.device, non_blocking=True)
