"""Gives up tokens of a sequence's cache: every KV head of every layer keeps as many, though not the same.

A place of the compacted sequence holds another token in each head, which attention does not mind: it is a sum over a
set, and keys carry their positions in them. So one block table and one length remain true for all layers, and the
blocks behind the kept tokens are free.

Heavy hitters by accumulated attention beside the most recent tokens: H2O, arXiv:2306.14048, section 4. The first tokens
and the most recent ones alone: StreamingLLM, arXiv:2309.17453, section 3.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from server.kvpool.tensors import KVTensors
from server.step import Compaction

MAX_MOVED_BYTES = 2**22
"""Bound of the memory that moved rows take meanwhile, unless those of a single layer take more. Small pieces are reused
by the allocator and stay in the cache of a CPU."""


def compact(pool: KVTensors, compaction: Compaction) -> None:
    """Move what the sequence keeps, in order, to the first `keep` places of its block table: keys, values, scales and
    scores as they are stored.

    All layers must share one block table.

    Raises ValueError for a policy that chooses by attention where the pool has no scores.
    """
    slots = _slots(pool, compaction)
    chosen: dict[int, Tensor] = {}
    if compaction.policy == "window":
        newest = compaction.length - (compaction.keep - compaction.sinks)
        kept = torch.cat((slots[: compaction.sinks], slots[newest:]))
        chosen = {layer: kept.expand(shape.kv_heads, -1) for layer, shape in enumerate(pool.layout.layers)}
    else:
        for scores, layers in pool.scores_with_layers:
            kept = slots[heaviest(scores.index_select(2, slots), compaction)]
            chosen.update(zip(layers, kept, strict=True))
    for storage, layers in pool.storages_with_layers:
        _move(storage, torch.stack([chosen[layer] for layer in layers]), slots[: compaction.keep])


def heaviest(scores: Tensor, compaction: Compaction) -> Tensor:
    """Which tokens each head keeps by its scores [layers, kv_heads, length]: int64 [layers, kv_heads, keep], ascending.

    The first `sinks`, the last `recent`, and of the others those with the highest scores, the older of equal ones.
    """
    sinks, keep, length = compaction.sinks, compaction.keep, compaction.length
    others = scores[..., sinks : length - compaction.recent]
    order = others.sort(dim=-1, descending=True, stable=True).indices
    heavy = order[..., : keep - sinks - compaction.recent].sort(dim=-1).values + sinks
    first = torch.arange(sinks, device=scores.device).expand(*heavy.shape[:2], -1)
    last = torch.arange(length - compaction.recent, length, device=scores.device).expand(*heavy.shape[:2], -1)
    return torch.cat((first, heavy, last), -1)


def _slots(pool: KVTensors, compaction: Compaction) -> Tensor:
    """Slots [length] of the sequence's tokens, on the device."""
    index = np.arange(compaction.length)
    blocks = compaction.block_table[index // pool.block_size].astype(np.int64)
    return torch.from_numpy(blocks * pool.block_size + index % pool.block_size).to(pool.device, non_blocking=True)


def _move(storage: Tensor, kept: Tensor, places: Tensor) -> None:
    """Copy rows at slots kept [layers, kv_heads, keep] of a storage to slots places [keep] of the same layer and head.

    Both may name the same slots: of each layer everything is read before anything is written.
    """
    layers, _, heads, num_slots, width = storage.shape
    rows = storage.view(-1, width)
    first = torch.arange(layers * heads, device=storage.device).view(layers, heads, 1) * num_slots
    sources, targets = first + kept, first + places
    at_once = max(1, MAX_MOVED_BYTES // (heads * len(places) * width * storage.element_size()))
    for source, target in zip(sources.split(at_once), targets.split(at_once), strict=True):
        rows.index_copy_(0, target.flatten(), rows.index_select(0, source.flatten()))
