"""Host memory against a dict of what each block must hold."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from server.kvpool import host as module
from server.kvpool.host import HostTensors
from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout, Visibility
from server.kvpool.tensors import KVTensors

CPU = torch.device("cpu")
POOL_BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 7, 5, 4

GQA = LayerLayout(AttentionKind.GQA, 2, 8, 6)
LATENT = LayerLayout(AttentionKind.MLA, 1, 10, 0, rope_dim=4)
FLOAT32, INT8 = CACHE_DTYPES["float32"], CACHE_DTYPES["int8"]
LAYOUTS = {
    "float32": CacheLayout((GQA, LayerLayout(AttentionKind.MHA, 4, 6, 4), GQA), FLOAT32, BLOCK_SIZE),
    "float16": CacheLayout((GQA,), CACHE_DTYPES["float16"], BLOCK_SIZE),
    "int8": CacheLayout((GQA, GQA), INT8, BLOCK_SIZE),
    "fp8": CacheLayout((GQA, GQA), CACHE_DTYPES["fp8"], BLOCK_SIZE),
    "latent": CacheLayout((LATENT, LATENT), FLOAT32, BLOCK_SIZE),
    "latent int8": CacheLayout((LATENT, LATENT), INT8, BLOCK_SIZE),
    "scored": CacheLayout((GQA, GQA), FLOAT32, BLOCK_SIZE, scored=True),
    "windowed": CacheLayout((GQA,) * 3, FLOAT32, BLOCK_SIZE, (Visibility(), Visibility(8), Visibility(8))),
}


def pool_of(name: str) -> KVTensors:
    """A pool in which no two numbers are likely to be equal; one that stores whole numbers has whole ones."""
    pool = KVTensors(LAYOUTS[name], POOL_BLOCKS, torch.float32, CPU)
    for storage in pool.storages:
        scramble(storage)
    return pool


def scramble(part: Tensor) -> None:
    part.copy_(torch.randn(part.shape) if part.is_floating_point() else torch.randint(0, 127, part.shape))


def block_of(pool: KVTensors, block: int) -> list[Tensor]:
    """All that the pool holds at a block's slots."""
    return [storage[..., block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE, :].clone() for storage in pool.storages]


def assert_same(pool: KVTensors, expected: Sequence[list[Tensor]]) -> None:
    for block, parts in enumerate(expected):
        assert all(map(torch.equal, block_of(pool, block), parts)), f"block {block}"


def pairs(sources: int, targets: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Blocks copied to different blocks; neighbours to neighbours often enough for runs to form."""
    scattered = st.lists(
        st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1)), max_size=5, unique_by=lambda pair: pair[1]
    )
    most = min(sources, targets)
    run = st.tuples(st.integers(0, sources - 1), st.integers(0, targets - 1), st.integers(1, most)).map(
        lambda r: [(r[0] + i, r[1] + i) for i in range(min(r[2], sources - r[0], targets - r[1]))]
    )
    return scattered | run


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=12)
@given(data=st.data())
def test_blocks_come_back_as_they_went(name: str, data: st.DataObject) -> None:
    """Steps of saves, loads and writes, as the runner executes them."""
    torch.manual_seed(0)
    pool = pool_of(name)
    host = HostTensors(pool, HOST_BLOCKS)
    expected = [block_of(pool, block) for block in range(POOL_BLOCKS)]
    saved: dict[int, list[Tensor]] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        saves = data.draw(pairs(POOL_BLOCKS, HOST_BLOCKS))
        host.save(saves)
        saved |= {target: expected[source] for source, target in saves}
        loads = [pair for pair in data.draw(pairs(HOST_BLOCKS, POOL_BLOCKS)) if pair[0] in saved]
        host.load(loads)
        for source, target in loads:
            expected[target] = saved[source]
        assert_same(pool, expected)
        written = data.draw(st.integers(0, POOL_BLOCKS - 1))
        for storage in pool.storages:
            scramble(storage[..., written * BLOCK_SIZE : (written + 1) * BLOCK_SIZE, :])
        expected[written] = block_of(pool, written)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_long_runs_are_copied_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of("float32")
    monkeypatch.setattr(module, "COPY_BYTES", most * pool.layout.bytes_per_block)
    host = HostTensors(pool, HOST_BLOCKS)
    before = [block_of(pool, block) for block in range(POOL_BLOCKS)]
    host.save([(block + 2, block) for block in range(5)])
    pool.fill_(0.0)
    host.load([(block, block + 2) for block in range(5)])
    assert_same(pool, [[torch.zeros_like(part) for part in before[0]]] * 2 + before[2:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_takes_as_much_as_in_the_pool(name: str) -> None:
    pool = pool_of(name)
    host = HostTensors(pool, HOST_BLOCKS)
    assert host.nbytes == HOST_BLOCKS * pool.layout.bytes_per_block
    assert HostTensors(pool, 0).nbytes == 0


def test_blocks_that_are_not_there_are_refused() -> None:
    host = HostTensors(pool_of("float32"), HOST_BLOCKS)
    with pytest.raises((IndexError, RuntimeError)):
        host.save([(1, HOST_BLOCKS)])
    with pytest.raises((IndexError, RuntimeError)):
        host.load([(0, POOL_BLOCKS)])
