"""What a step adds to the scores of the keys it attends to: accumulated attention (H2O, arXiv:2306.14048)."""

from __future__ import annotations

import torch
from torch import Tensor

from server.kvpool.tensors import KVTensors


def score_places(pool: KVTensors, kv_heads: int, slots: Tensor) -> Tensor:
    """Where slots [n] of each head are in a layer's scores, flattened: [kv_heads * n]."""
    heads = torch.arange(kv_heads, device=slots.device)[:, None] * (pool.num_blocks * pool.block_size)
    return (heads + slots).flatten()


def add_scores(pool: KVTensors, layer: int, places: Tensor, received: Tensor) -> None:
    """Add to a layer's scores what keys received, [kv_heads, ...] at places [kv_heads * ...] of `score_places`.

    Places may come twice, as those that pad a bucket do, if all but one received nothing: then the order of the
    additions makes no difference.

    Raises ValueError where the pool has no scores.
    """
    if pool.scores is None:
        raise ValueError("the pool keeps no scores of attention")
    pool.scores[layer].view(-1).index_add_(0, places, received.flatten())
