from __future__ import annotations

import pytest
import torch

from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout
from server.kvpool.tensors import KVTensors

LAYERS = (
    LayerLayout(AttentionKind.GQA, 2, 8, 8),
    LayerLayout(AttentionKind.MHA, 4, 6, 4),
    LayerLayout(AttentionKind.GQA, 2, 8, 8),
    LayerLayout(AttentionKind.MLA, 1, 10, 0),
)
LAYOUT = CacheLayout(LAYERS, CACHE_DTYPES["float32"], 4)
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> KVTensors:
    return KVTensors(LAYOUT, num_blocks=5, dtype=torch.float32, device=CPU)


def test_size_is_the_formulas(pool: KVTensors) -> None:
    assert pool.nbytes == 5 * LAYOUT.bytes_per_block


def test_has_the_promised_shapes(pool: KVTensors) -> None:
    for layer, layout in enumerate(LAYERS):
        assert pool.keys(layer).shape == (5, 4, layout.kv_heads, layout.key_dim)
        assert pool.values(layer).shape == (5, 4, layout.kv_heads, layout.value_dim or layout.key_dim)


def test_the_trash_block_starts_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory the pool is given: the step that measures memory attends to the trash block."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    pool = KVTensors(LAYOUT, num_blocks=3, dtype=torch.float32, device=CPU)
    for layer in range(len(LAYERS)):
        assert not pool.keys(layer)[0].any()
        assert not pool.values(layer)[0].any()
        assert pool.keys(layer)[1:].isnan().all()


def test_what_is_written_is_where_it_belongs_and_nowhere_else(pool: KVTensors) -> None:
    pool.fill_(float("nan"))
    slots = torch.tensor([6, 17, 7])
    key, value = torch.randn(4, 3, 6), torch.randn(4, 3, 4)
    pool.write(1, slots, key, value)
    assert torch.equal(pool.keys(1)[1, 2], key[:, 0])
    assert torch.equal(pool.keys(1)[4, 1], key[:, 1])
    assert torch.equal(pool.values(1)[1, 3], value[:, 2])
    assert pool.keys(1).isfinite().sum() == key.numel()
    assert all(pool.keys(layer).isnan().all() for layer in (0, 2, 3))


def test_a_run_is_a_view_of_every_layer(pool: KVTensors) -> None:
    for layer in range(len(LAYERS)):
        pool.flat_keys(layer).normal_()
        pool.flat_values(layer).normal_()
    runs = pool.runs(6, 9)
    for layer, (key, value) in enumerate(runs):
        assert torch.equal(key[0], pool.flat_keys(layer)[:, 6:15])
        assert torch.equal(value[0], pool.flat_values(layer)[:, 6:15])
        assert key.untyped_storage().data_ptr() == pool.keys(layer).untyped_storage().data_ptr()


def test_needs_the_trash_block() -> None:
    with pytest.raises(ValueError, match="trash block"):
        KVTensors(LAYOUT, 0, torch.float32, CPU)
