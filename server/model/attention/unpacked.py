"""A cache that is stored otherwise than the model computes, as backends see it that read memory in place."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from server.kvpool.layout import Visibility
from server.model.attention.metadata import StepMetadata
from server.model.spec import LayerSpec
from server.step import Int64Array


def unpacked_step(step: StepMetadata, spec: LayerSpec) -> StepMetadata:
    """The step over memory that holds what the layer attends to in the type that the model computes in.

    That is the step itself where the pool holds it so. Elsewhere the blocks that the layer's queries see are laid out
    one after another, each once, and block tables name them there: what attended to the pool attends to them. They are
    those of the layer asked for last. Scores are no part of them, and `slots` remain those of the pool.
    """
    if step.pool.in_place:
        return step
    blocks, unpacked = step.once(("unpacked", spec.visibility), lambda: _plan(step, spec.visibility))
    step.pool.unpack(spec.layer_idx, blocks)
    return unpacked


def _plan(step: StepMetadata, visibility: Visibility) -> tuple[Tensor, StepMetadata]:
    """The blocks that are seen, and the step with tables of where each of them is among these."""
    size, tables = step.block_size, step.host_block_tables
    rows: Int64Array = np.arange(len(tables))
    first = step.first_visible(rows, visibility) // size
    last = (step.host_context_lens - 1) // size
    column = np.arange(tables.shape[1])
    seen = (column >= first[:, None]) & (column <= last[:, None])
    # In the order of the tables, sequence by sequence, so that what one sequence has to itself is a single run.
    names, places, which = np.unique(tables[seen], return_index=True, return_inverse=True)
    order = np.argsort(places)
    at = np.empty_like(order)
    at[order] = np.arange(len(order))
    moved = np.zeros_like(tables)
    moved[seen] = at[which]
    device = step.slots.device
    unpacked = StepMetadata(
        pool=step.pool.unpacked,
        slots=step.slots,
        positions=step.positions,
        context_lens=step.context_lens,
        block_tables=torch.from_numpy(moved.astype(np.int64)).to(device),
        query_starts=step.query_starts,
        host_context_lens=step.host_context_lens,
        host_block_tables=moved,
        observed=step.observed,
    )
    return torch.from_numpy(names[order].astype(np.int64)).to(device), unpacked
