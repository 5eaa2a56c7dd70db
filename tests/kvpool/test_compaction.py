"""Compactions against plain loops over copies of what the pool held, for pools of every stored type."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import server.kvpool.compaction
from server.kvpool.compaction import compact
from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout
from server.kvpool.tensors import KVTensors
from server.step import Compaction, EvictionPolicy
from tests.kvpool.kept import kept_tokens

LAYERS = (
    LayerLayout(AttentionKind.GQA, 2, 8, 8),
    LayerLayout(AttentionKind.MHA, 4, 6, 4),
    LayerLayout(AttentionKind.MLA, 1, 10, 0, rope_dim=4),
    LayerLayout(AttentionKind.GQA, 2, 8, 8),
    LayerLayout(AttentionKind.GQA, 2, 6, 8),
)
NUM_BLOCKS = 14


def filled_pool(dtype: str, block_size: int, seed: int, *, scored: bool = True) -> KVTensors:
    """Every slot different, scores so few that many are equal."""
    layout = CacheLayout(LAYERS, CACHE_DTYPES[dtype], block_size, scored=scored)
    pool = KVTensors(layout, NUM_BLOCKS, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    every = torch.arange(NUM_BLOCKS * block_size)
    for index, layer in enumerate(LAYERS):
        key = torch.randn(layer.kv_heads, len(every), layer.key_dim, generator=generator)
        pool.write(index, every, key, torch.randn(layer.kv_heads, len(every), layer.value_dim, generator=generator))
        if pool.scores is not None:
            drawn = torch.randint(0, 4, pool.scores[index].shape, generator=generator)
            pool.scores[index].copy_(drawn / 3)
    return pool


def contents(pool: KVTensors) -> list[list[Tensor]]:
    """Of each layer what all slots hold, [kv_heads, slots, ...]: keys, values and scores."""
    every = torch.arange(pool.num_blocks * pool.block_size)
    layers = [list(pool.read(layer, every)) for layer in range(len(LAYERS))]
    if pool.scores is not None:
        for layer, scores in zip(layers, pool.scores, strict=True):
            layer.append(scores.clone())
    return layers


def compacted_by_hand(pool: KVTensors, compaction: Compaction) -> list[list[Tensor]]:
    """What the pool should hold afterwards; `pool` is as it was before."""
    size, table = pool.block_size, compaction.block_table.tolist()
    slots = [table[token // size] * size + token % size for token in range(compaction.length)]
    before, after = contents(pool), contents(pool)
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        for head in range(LAYERS[layer].kv_heads):
            scores = [0.0] * compaction.length
            if pool.scores is not None:
                scores = [float(pool.scores[layer][head, slot]) for slot in slots]
            for place, token in enumerate(kept_tokens(scores, compaction)):
                for was, becomes in zip(old, new, strict=True):
                    becomes[head, slots[place]] = was[head, slots[token]]
    return after


@st.composite
def compactions(draw: st.DrawFn, block_size: int) -> Compaction:
    length = draw(st.integers(2, (NUM_BLOCKS - 1) * block_size))
    keep = draw(st.integers(1, length))
    recent = draw(st.integers(0, keep))
    blocks = list(range(1, NUM_BLOCKS))
    random.Random(draw(st.integers(0, 1000))).shuffle(blocks)
    return Compaction(
        block_table=np.array(blocks[: -(-length // block_size)], dtype=np.int32),
        length=length,
        keep=keep,
        sinks=draw(st.integers(0, min(4, keep - recent))),
        recent=recent,
        policy=draw(st.sampled_from(["h2o", "h2o", "window"])),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(list(CACHE_DTYPES)),
    st.sampled_from([1, 2**26]),
    st.booleans(),
)
def test_equals_plain_loops(data: st.DataObject, block_size: int, dtype: str, moved_bytes: int, scored: bool) -> None:
    compaction = data.draw(compactions(block_size))
    pool = filled_pool(dtype, block_size, compaction.length, scored=scored or compaction.policy == "h2o")
    expected = compacted_by_hand(pool, compaction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.kvpool.compaction, "MAX_MOVED_BYTES", moved_bytes)
        compact(pool, compaction)
    for layer, (actual, wanted) in enumerate(zip(contents(pool), expected, strict=True)):
        for what, is_there, should_be in zip(("keys", "values", "scores"), actual, wanted, strict=False):
            assert torch.equal(is_there, should_be), f"{what} of layer {layer}"


def example(policy: EvictionPolicy, keep: int = 10) -> Compaction:
    return Compaction(np.array([7, 3, 9, 1], dtype=np.int32), length=16, keep=keep, sinks=2, recent=4, policy=policy)


def test_moves_bytes_as_they_are_stored() -> None:
    """Quantised again from what was read, rows would not be the same."""
    pool = filled_pool("int8", 4, 0)
    before = [storage.clone() for storage in pool.storages]
    compact(pool, example("window", keep=6))
    for old, new in zip(before, pool.storages, strict=True):
        assert new.dtype in (torch.int8, torch.float32)
        assert torch.equal(new[..., [28, 29, 30, 31, 12, 13], :], old[..., [28, 29, 4, 5, 6, 7], :])
        others = [slot for slot in range(NUM_BLOCKS * 4) if slot not in (28, 29, 30, 31, 12, 13)]
        assert torch.equal(new[..., others, :], old[..., others, :])


def test_of_equal_scores_the_older_stay() -> None:
    pool = filled_pool("float32", 4, 0)
    assert pool.scores is not None
    for scores in pool.scores:
        scores.fill_(0.5)
    expected = contents(pool)
    compact(pool, example("h2o"))
    slots = [28, 29, 30, 31, 12, 13, 14, 15, 36, 37, 38, 39, 4, 5, 6, 7]
    kept = [0, 1, 2, 3, 4, 5, 12, 13, 14, 15]
    for old, new in zip(expected, contents(pool), strict=True):
        assert torch.equal(new[0][:, slots[:10]], old[0][:, [slots[token] for token in kept]])


def test_choosing_by_attention_needs_scores() -> None:
    with pytest.raises(ValueError, match="no scores"):
        compact(filled_pool("float32", 4, 0, scored=False), example("h2o"))
