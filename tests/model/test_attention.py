"""Backends against a dense computation in float64, on random ragged batches in a pool full of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import server.kvpool.tensors
import server.model.attention.cpu
import server.model.attention.reference
from server.kvpool.layout import CACHE_DTYPES, CacheLayout, Visibility
from server.kvpool.tensors import KVTensors
from server.model.attention import AttentionBackend, select_backends
from server.model.attention.cpu import CpuBackend
from server.model.attention.metadata import StepMetadata
from server.model.attention.reference import ReferenceBackend
from server.model.spec import LayerSpec

CPU = torch.device("cpu")


@dataclass
class Batch:
    """A step: query lengths and context lengths of its sequences."""

    spec: LayerSpec
    query_lens: list[int]
    context_lens: list[int]
    block_size: int
    contiguous: bool
    seed: int


@st.composite
def specs(draw: st.DrawFn, *, softcap: bool, narrow_values: bool) -> LayerSpec:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (4, 1)]))
    key_dim = draw(st.sampled_from([8, 20]))
    window, chunk = draw(st.sampled_from([(None, None), (None, None), (1, None), (5, None), (30, None), (None, 4)]))
    return LayerSpec(
        layer_idx=draw(st.integers(0, 1)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=6 if narrow_values and draw(st.booleans()) else key_dim,
        scale=draw(st.sampled_from([0.3, 1.0])),
        window=window,
        chunk=chunk,
        softcap=2.0 if softcap and draw(st.booleans()) else None,
        has_sink=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn, *, softcap: bool = False, narrow_values: bool = False) -> Batch:
    lengths = draw(st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 7]), st.integers(0, 40)), min_size=1, max_size=6))
    return Batch(
        spec=draw(specs(softcap=softcap, narrow_values=narrow_values)),
        query_lens=[queries for queries, _ in lengths],
        context_lens=[queries + earlier for queries, earlier in lengths],
        block_size=draw(st.sampled_from([1, 4, 16])),
        contiguous=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def pool_of(
    specs: list[LayerSpec], num_blocks: int, block_size: int, dtype: torch.dtype, stored: str | None = None
) -> KVTensors:
    layout = tuple(spec.layout for spec in specs)
    stored = stored or str(dtype).removeprefix("torch.")
    return KVTensors(CacheLayout(layout, CACHE_DTYPES[stored], block_size), num_blocks, dtype, CPU)


def attend(
    backend: AttentionBackend, batch: Batch, dtype: torch.dtype = torch.float32, stored: str | None = None
) -> tuple[Tensor, Tensor]:
    """The backend's output and the dense one over what the pool keeps of keys and values, both [T, H, value_dim]."""
    spec, size = batch.spec, batch.block_size
    generator = torch.Generator().manual_seed(batch.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    needed = [-(-length // size) for length in batch.context_lens]
    blocks = np.arange(1, sum(needed) + 1)
    if not batch.contiguous:
        np.random.default_rng(batch.seed).shuffle(blocks)
    tables = np.zeros((len(needed), max(needed)), dtype=np.int32)
    for table, count, last in zip(tables, needed, np.cumsum(needed), strict=True):
        table[:count] = blocks[last - count : last]

    pool = pool_of([spec] * 2, sum(needed) + 1, size, dtype, stored)
    pool.fill_(float("nan"))
    sink = normal(spec.num_heads) if spec.has_sink else None
    queries, keys, values, slots, positions, dense = [], [], [], [], [], []
    for table, count, context_len in zip(tables, batch.query_lens, batch.context_lens, strict=True):
        q = normal(count, spec.num_heads, spec.key_dim)
        k = normal(context_len, spec.num_kv_heads, spec.key_dim)
        v = normal(context_len, spec.num_kv_heads, spec.value_dim)
        index = np.arange(context_len)
        at = torch.from_numpy(table[index // size].astype(np.int64) * size + index % size)
        k, v = (part.transpose(0, 1) for part in pool.write(spec.layer_idx, at, k.transpose(0, 1), v.transpose(0, 1)))
        queries.append(q)
        keys.append(k[-count:])
        values.append(v[-count:])
        slots.append(at[-count:])
        positions.append(torch.arange(context_len - count, context_len))
        dense.append(dense_attention(q, k, v, sink, spec))
    step = StepMetadata(
        pool=pool,
        slots=torch.cat(slots),
        positions=torch.cat(positions),
        context_lens=torch.tensor(batch.context_lens),
        block_tables=torch.from_numpy(tables.astype(np.int64)),
        query_starts=np.cumsum([0, *batch.query_lens], dtype=np.int32),
        host_context_lens=np.array(batch.context_lens, dtype=np.int32),
        host_block_tables=tables,
    )
    key, value = torch.cat(keys).transpose(0, 1), torch.cat(values).transpose(0, 1)
    with torch.inference_mode():
        first = backend.attend(torch.cat(queries), key, value, sink, spec, step)
        again = backend.attend(torch.cat(queries), key, value, sink, spec, step)
    assert torch.equal(first, again), "the layers of a step disturb each other"
    return first, torch.cat(dense)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, spec: LayerSpec) -> Tensor:
    """Attention by the book, head by head and query by query, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty(len(q), spec.num_heads, spec.value_dim, dtype=torch.float64)
    for i, position in enumerate(range(len(k) - len(q), len(k))):
        for head in range(spec.num_heads):
            seen = [
                j
                for j in range(position + 1)
                if (spec.window is None or position - j < spec.window)
                and (spec.chunk is None or j // spec.chunk == position // spec.chunk)
            ]
            kv_head = head * spec.num_kv_heads // spec.num_heads
            scores = k[seen, kv_head] @ q[i, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            weights = scores.exp()
            total = weights.sum() + (0.0 if sink is None else sink[head].double().exp())
            out[i, head] = weights @ v[seen, kv_head] / total
    return out


@settings(max_examples=60, deadline=None)
@given(batches(softcap=True, narrow_values=True))
def test_reference(batch: Batch) -> None:
    actual, dense = attend(ReferenceBackend(), batch)
    torch.testing.assert_close(actual.double(), dense, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(batches(softcap=True, narrow_values=True))
def test_reference_in_small_pieces(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model.attention.reference, "MAX_GATHERED", 30)
        patch.setattr(server.model.attention.reference, "MAX_SCORES", 100)
        actual, dense = attend(ReferenceBackend(), batch)
    torch.testing.assert_close(actual.double(), dense, atol=1e-5, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from([0, 100]))
def test_cpu(batch: Batch, dense_group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model.attention.cpu, "DENSE_GROUP", dense_group)
        actual, dense = attend(CpuBackend(), batch)
    torch.testing.assert_close(actual.double(), dense, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from([CpuBackend(), ReferenceBackend()]))
def test_bfloat16(batch: Batch, backend: AttentionBackend) -> None:
    actual, dense = attend(backend, batch, torch.bfloat16)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), dense, atol=0.06, rtol=0.06)


STORED = st.sampled_from(["int8", "fp8", "bfloat16", "float16"])


@settings(max_examples=60, deadline=None)
@given(batches(), STORED, st.sampled_from([0, 100]))
def test_cpu_over_a_pool_of_another_type(batch: Batch, stored: str, dense_group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model.attention.cpu, "DENSE_GROUP", dense_group)
        patch.setattr(server.kvpool.tensors, "UNPACKED_NUMBERS", 1000)
        actual, dense = attend(CpuBackend(), batch, stored=stored)
    torch.testing.assert_close(actual.double(), dense, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(batches(softcap=True, narrow_values=True), STORED)
def test_reference_over_a_pool_of_another_type(batch: Batch, stored: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model.attention.reference, "MAX_GATHERED", 30)
        actual, dense = attend(ReferenceBackend(), batch, stored=stored)
    torch.testing.assert_close(actual.double(), dense, atol=1e-5, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from([CpuBackend(), ReferenceBackend()]), st.sampled_from(["int8", "fp8", "float32"]))
def test_bfloat16_over_a_pool_of_another_type(batch: Batch, backend: AttentionBackend, stored: str) -> None:
    actual, dense = attend(backend, batch, torch.bfloat16, stored)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), dense, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_shared_and_scattered_blocks_are_unpacked_once(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences begin with the same blocks, of which the first is out of sight; a third has its own in reverse."""
    spec = LayerSpec(0, 4, 2, 8, 8, 0.3, window=9)
    pool = pool_of([spec], 12, 4, torch.float32, stored)
    pool.fill_(float("nan"))
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(4, 44)
    rows = torch.randn(2, 40, 8, generator=generator)
    written, _ = pool.write(0, slots, rows, rows)
    tables = np.array([[3, 4, 1, 5], [3, 4, 1, 2], [9, 8, 7, 0]], dtype=np.int32)
    lengths = np.array([15, 14, 12], dtype=np.int32)
    unpacked: list[list[int]] = []
    unpack = KVTensors.unpack
    monkeypatch.setattr(
        KVTensors, "unpack", lambda self, layer, blocks: (unpacked.append(blocks.tolist()), unpack(self, layer, blocks))
    )
    nowhere = torch.zeros(3, dtype=torch.int64)
    step = StepMetadata(
        pool,
        nowhere,
        nowhere,
        torch.from_numpy(lengths).long(),
        torch.from_numpy(tables).long(),
        np.arange(4, dtype=np.int32),
        lengths,
        tables,
    )
    query = torch.randn(3, 4, 8, generator=generator)
    out = CpuBackend().attend(query, written[:, :3], written[:, :3], None, spec, step)
    assert unpacked == [[4, 1, 5, 2, 9, 8, 7]]
    for row in range(3):
        index = np.arange(lengths[row])
        at = tables[row][index // 4] * 4 + index % 4 - 4
        keys = written[:, at].transpose(0, 1)
        expected = dense_attention(query[row : row + 1], keys, keys, None, spec)
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stored", [None, "int8", "fp8", "float16"])
def test_a_sequence_full_of_nan_leaves_the_others_alone(stored: str | None) -> None:
    spec = LayerSpec(0, 4, 2, 8, 8, 0.3)
    pool = pool_of([spec], 5, 4, torch.float32, stored)
    generator = torch.Generator().manual_seed(0)
    for slot in range(4, 20):
        key = torch.randn(2, 1, 8, generator=generator) if slot < 12 else torch.full((2, 1, 8), float("nan"))
        pool.write(0, torch.tensor([slot]), key, key)
    tables = np.array([[1, 2], [3, 4]], dtype=np.int32)
    for backend in (CpuBackend(), ReferenceBackend()):
        for counts in ([1, 1], [3, 3], [1, 3], [3, 1]):
            starts = np.cumsum([0, *counts], dtype=np.int32)
            query = torch.randn(sum(counts), 4, 8, generator=generator)
            key = torch.randn(2, sum(counts), 8, generator=generator)
            key[:, counts[0] :] = float("nan")
            lengths = np.array([7, 8], dtype=np.int32)
            nowhere = torch.zeros(sum(counts), dtype=torch.int64)
            step = StepMetadata(
                pool, nowhere, nowhere, torch.tensor([7, 8]), torch.from_numpy(tables).long(), starts, lengths, tables
            )
            for _ in range(2):
                out = backend.attend(query, key, key, None, spec, step)
                assert out[: counts[0]].isfinite().all()
                assert not out[counts[0] :].isfinite().any()


@pytest.mark.parametrize(
    ("visibility", "query", "first"),
    [
        (Visibility(), 9, 0),
        (Visibility(window=4), 9, 6),
        (Visibility(window=4), 2, 0),
        (Visibility(chunk=4), 9, 8),
        (Visibility(chunk=4), 8, 8),
        (Visibility(window=2, chunk=8), 11, 10),
    ],
)
def test_first_visible_key(visibility: Visibility, query: int, first: int) -> None:
    assert visibility.first(query) == first


def test_selection_falls_back_layer_by_layer() -> None:
    plain = LayerSpec(0, 4, 2, 8, 8, 1.0)
    capped = LayerSpec(1, 4, 2, 8, 8, 1.0, softcap=5.0)
    latent = LayerSpec(2, 4, 4, 12, 8, 1.0)
    names = [backend.name for backend in select_backends("auto", (plain, capped, latent), CPU)]
    assert names == ["cpu", "reference", "reference"]
    cuda = torch.device("cuda")
    assert [backend.name for backend in select_backends("auto", (plain,), cuda)] == ["reference"]
    with pytest.raises(ValueError, match="does not run on cuda"):
        select_backends("cpu", (plain,), cuda)
    with pytest.raises(ValueError, match="choose auto, reference or cpu"):
        select_backends("flash", (plain,), CPU)


def test_a_context_longer_than_the_pool_is_an_error() -> None:
    spec = LayerSpec(0, 2, 1, 8, 8, 0.3)
    pool = pool_of([spec], 2, 4, torch.float32)
    lengths, tables, nowhere = np.array([9], dtype=np.int32), np.array([[1, 1, 1]], dtype=np.int32), torch.tensor([0])
    starts = np.array([0, 1], dtype=np.int32)
    step = StepMetadata(pool, nowhere, nowhere, torch.tensor([9]), torch.ones(1, 3).long(), starts, lengths, tables)
    query, key = torch.zeros(1, 2, 8), torch.zeros(1, 1, 8)
    with pytest.raises(ValueError, match="more tokens than the pool has slots"):
        CpuBackend().attend(query, key, key, None, spec, step)
