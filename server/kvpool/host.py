"""The second tier of the cache: blocks of main memory that take what the pool gives up and give it back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from server.kvpool.tensors import KVTensors

COPY_BYTES = 2**25
"""Most that is copied at once. On CUDA as much device memory is taken meanwhile, where blocks are made dense."""


class HostTensors:
    """`num_blocks` blocks of main memory, each with room for all that a block of the pool holds.

    For each storage of the pool there is one tensor [num_blocks, layers, 1, kv_heads, block_size, width]. Other than in
    the pool the block comes first, so that one is dense: a copy engine moves only dense memory, and does so without the
    CPU where that is pinned. Here whole blocks move and nothing is computed, so no reader wants the pool's order.

    Every copy to and from a GPU is queued on the current stream, that of the passes, and no other code touches this
    memory. That alone keeps each copy whole, though none is waited for: a pass writes over a pool block only once it
    has been saved, a load starts only once the save before it has arrived, and a save into a block from which a load
    is under way waits for that one. The CPU never reads or writes a block itself, so it cannot be too early or late.

    Args:
        pool: what is copied from and to, for as long as this lives.
        num_blocks: 0 for none.

    Raises:
        MemoryError: so much memory cannot be pinned.
    """

    def __init__(self, pool: KVTensors, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = [_block_first(storage, pool.block_size) for storage in pool.storages]
        self._host = [torch.empty(num_blocks, *storage.shape[1:], dtype=storage.dtype) for storage in self._pool]
        self._most = max(1, COPY_BYTES // pool.layout.bytes_per_block)
        for device, host in zip(self._pool, self._host, strict=True):
            if device.is_cuda and num_blocks:
                _pin(self, host)

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self._host)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (block of the pool, block of the host). Of two into one block, the later one stays."""
        for source, target, count in _runs(pairs, self._most):
            for device, host in zip(self._pool, self._host, strict=True):
                host.narrow(0, target, count).copy_(device.narrow(0, source, count), non_blocking=True)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back (block of the host, block of the pool)."""
        for source, target, count in _runs(pairs, self._most):
            for device, host in zip(self._pool, self._host, strict=True):
                device.narrow(0, target, count).copy_(host.narrow(0, source, count), non_blocking=True)


def _block_first(storage: Tensor, block_size: int) -> Tensor:
    """A storage [layers, 1, kv_heads, slots, width] as a view [blocks, layers, 1, kv_heads, block_size, width]."""
    layers, _, heads, _, width = storage.shape
    return storage.view(layers, 1, heads, -1, block_size, width).permute(3, 0, 1, 2, 4, 5)


def _runs(pairs: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int, int]]:
    """The pairs as (source, target, count), where both sides go on block by block, of up to `most` blocks.

    A copy of each run takes half the time of gathering scattered blocks first, even where every run is of one block.
    """
    start = 0
    for end in range(1, len(pairs) + 1):
        source, target = pairs[start]
        count = end - start
        if end == len(pairs) or count == most or pairs[end] != (source + count, target + count):
            yield source, target, count
            start = end


def _pin(owner: HostTensors, host: Tensor) -> None:
    """Lock the memory of `host` while `owner` lives, so that a GPU copies from and to it by itself.

    torch's own pinned memory is rounded up to a power of two, which would take up to twice the limit that was set.
    """
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if status:
        raise MemoryError(f"{host.nbytes} bytes of main memory could not be pinned for the GPU: CUDA error {status}")
    weakref.finalize(owner, cudart.cudaHostUnregister, host.data_ptr()).atexit = False
