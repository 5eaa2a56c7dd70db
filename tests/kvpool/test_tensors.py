from __future__ import annotations

import pytest
import torch

import server.kvpool.tensors
from server.kvpool.layout import (
    CACHE_DTYPES,
    EVERYTHING,
    AttentionKind,
    CacheDtype,
    CacheLayout,
    LayerLayout,
    Visibility,
)
from server.kvpool.quantise import dequantise, quantise, storage_dtype
from server.kvpool.tensors import KVTensors, unpacked_bytes

LAYERS = (
    LayerLayout(AttentionKind.GQA, 2, 8, 8),
    LayerLayout(AttentionKind.MHA, 4, 6, 4),
    LayerLayout(AttentionKind.GQA, 2, 8, 8),
    LayerLayout(AttentionKind.MLA, 1, 10, 0, rope_dim=4),
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


# Stored in another type than the model computes in


def stored_as(dtype: str, num_blocks: int = 5, computed: torch.dtype = torch.float32) -> KVTensors:
    return KVTensors(CacheLayout(LAYERS, CACHE_DTYPES[dtype], 4), num_blocks, computed, CPU)


def write_everywhere(pool: KVTensors) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Random rows in all slots of all layers, and what the pool said of them."""
    slots = torch.randperm(pool.num_blocks * pool.block_size)
    told = {}
    for index, layer in enumerate(LAYERS):
        key = torch.randn(layer.kv_heads, len(slots), layer.key_dim)
        key[..., layer.key_dim - 4 :] *= 50
        value = torch.randn(layer.kv_heads, len(slots), layer.value_dim or layer.key_dim)
        key, value = pool.write(index, slots, key.to(pool.dtype), value.to(pool.dtype))
        order = slots.argsort()
        told[index] = key[:, order], value[:, order]
    return told


OTHERS = [("int8", torch.float32), ("fp8", torch.float32), ("bfloat16", torch.float32), ("float16", torch.float32)]
OTHERS += [("int8", torch.bfloat16), ("fp8", torch.float16), ("float32", torch.bfloat16)]


@pytest.mark.parametrize("dtype", CACHE_DTYPES.values(), ids=CACHE_DTYPES)
@pytest.mark.parametrize("scored", [False, True])
def test_size_is_the_formulas_for_every_type(dtype: CacheDtype, scored: bool) -> None:
    grouped = (EVERYTHING, Visibility(window=4), EVERYTHING, Visibility(window=4), Visibility(window=4))
    for layers, visibilities in ((LAYERS, ()), ((LAYERS[0],) * 5, grouped), ((LAYERS[3],) * 5, grouped)):
        layout = CacheLayout(layers, dtype, 4, visibilities, scored)
        assert len(layout.groups) == (3 if visibilities else 1)
        pool = KVTensors(layout, 7, torch.float32, CPU)
        assert pool.nbytes == 7 * layout.bytes_per_block == sum(storage.nbytes for storage in pool.storages)


def test_more_tokens_fit_as_the_formula_says() -> None:
    """64 MiB of SmolLM2-135M's cache: 30 layers of 3 heads of 64."""
    layer = LayerLayout(AttentionKind.GQA, 3, 64, 64)
    held = {}
    for name, dtype in CACHE_DTYPES.items():
        layout = CacheLayout((layer,) * 30, dtype, 16)
        blocks = 2**26 // layout.bytes_per_block
        pool = KVTensors(layout, blocks, torch.float32, CPU)
        assert pool.nbytes <= 2**26 < pool.nbytes + layout.bytes_per_block
        held[name] = blocks * 16
    assert held == {"float32": 1456, "bfloat16": 2912, "float16": 2912, "int8": 5472, "fp8": 5472}
    assert held["int8"] / held["float32"] == pytest.approx(64 * 4 / (64 + 4), rel=0.01)


@pytest.mark.parametrize(("dtype", "computed"), OTHERS)
def test_what_is_read_is_what_a_write_returned(dtype: str, computed: torch.dtype) -> None:
    pool = stored_as(dtype, computed=computed)
    pool.fill_(float("nan"))
    told = write_everywhere(pool)
    slots = torch.tensor([7, 3, 3, 18, 0])
    for layer, (key, value) in told.items():
        for read, expected in zip(pool.read(layer, slots), (key, value), strict=True):
            assert read.dtype is computed
            assert torch.equal(read, expected[:, slots])


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_latent_row_has_a_scale_for_each_part(stored: str) -> None:
    """Its rotary part may be a hundred times as large: that is no reason to round the latent to nothing."""
    pool = stored_as(stored)
    row = torch.cat((torch.randn(1, 3, 6) / 10, torch.randn(1, 3, 4) * 100), -1)
    key, value = pool.write(3, torch.tensor([4, 9, 2]), row, row)
    assert torch.equal(key, value)
    for part in (slice(0, 6), slice(6, 10)):
        alone = row[..., part]
        data, scales = quantise(alone, (alone.shape[-1],), storage_dtype(CACHE_DTYPES[stored]))
        assert torch.equal(key[..., part], dequantise(data, scales, (alone.shape[-1],), torch.empty_like(alone)))


@pytest.mark.parametrize(("dtype", "computed"), OTHERS)
def test_unpacked_blocks_are_what_is_read(dtype: str, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.kvpool.tensors, "UNPACKED_NUMBERS", 200)  # one block or a few
    pool = stored_as(dtype, 9, computed)
    write_everywhere(pool)
    memory = {storage.data_ptr() for storage in pool.unpacked.storages}
    assert pool.unpacked.nbytes == 9 * unpacked_bytes(pool.layout, computed)
    blocks = torch.tensor([7, 1, 8, 3, 2])
    slots = (blocks[:, None] * 4 + torch.arange(4)).flatten()
    for layer in (3, 0, 1, 2, 0):
        pool.unpack(layer, blocks)
        key, value = pool.read(layer, slots)
        assert torch.equal(pool.unpacked.flat_keys(layer)[:, :20], key)
        assert torch.equal(pool.unpacked.flat_values(layer)[:, :20], value)
    assert {storage.data_ptr() for storage in pool.unpacked.storages} == memory


@pytest.mark.parametrize(("dtype", "computed"), OTHERS)
def test_other_numbers_cannot_be_had_in_place(dtype: str, computed: torch.dtype) -> None:
    pool = stored_as(dtype, computed=computed)
    assert not pool.in_place
    for view in (pool.keys, pool.values, pool.flat_keys, pool.flat_values):
        with pytest.raises(TypeError, match=f"stored as {dtype}"):
            view(0)
    with pytest.raises(TypeError, match=f"stored as {dtype}"):
        pool.runs(0, 4)
    assert stored_as("bfloat16", computed=torch.bfloat16).in_place
    assert unpacked_bytes(CacheLayout(LAYERS, CACHE_DTYPES["bfloat16"], 4), torch.bfloat16) == 0


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_the_storages_hold_everything(dtype: str) -> None:
    """What moves whole slots of them, as compactions and copies to the host do, moves keys and values with them."""
    pool, other = stored_as(dtype), stored_as(dtype)
    told = write_everywhere(pool)
    other.fill_(float("nan"))
    for source, target in zip(pool.storages, other.storages, strict=True):
        target.narrow(3, 4, 4).copy_(source.narrow(3, 12, 4))
    for layer, pair in told.items():
        for read, expected in zip(other.read(layer, torch.arange(4, 8)), pair, strict=True):
            assert torch.equal(read, expected[:, 12:16])
        assert all(read.isnan().all() for read in other.read(layer, torch.tensor([3, 8])))
