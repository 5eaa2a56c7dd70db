"""The pool's memory: keys and values of all blocks, for every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.kvpool.layout import LayerLayout


class KVTensors:
    """Keys [num_blocks, block_size, kv_heads, key_dim] and values [.., value_dim] of each layer.

    In memory the heads come first, so that a run of consecutive blocks is, for each head, one dense matrix
    [tokens, dim]: torch's CPU kernel reads such runs in place, about 1.5 times as fast as rows that are kv_heads * dim
    apart. Layers of one shape share a tensor, so that a run can be sliced for all of them at once.

    The trash block starts zeroed, since the step that measures memory attends to it; the rest starts with whatever was
    there, so that a start does not wait for gigabytes to be written. Readers must never let a slot beyond a sequence's
    length, nor the trash block 0, reach a result: a factor of zero does not stop a NaN.
    """

    def __init__(
        self,
        layers: Sequence[LayerLayout],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least the trash block, got num_blocks={num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._keys = _Stacks(
            [(layer.kv_heads, layer.key_dim) for layer in layers], num_blocks * block_size, dtype, device
        )
        self._values = _Stacks(
            [(layer.kv_heads, layer.value_dim) for layer in layers], num_blocks * block_size, dtype, device
        )
        for stack in (*self._keys.stacks, *self._values.stacks):
            stack.narrow(3, 0, block_size).zero_()

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def keys(self, layer: int) -> Tensor:
        """Keys of one layer as a view [num_blocks, block_size, kv_heads, key_dim]."""
        return self._blocked(self.flat_keys(layer))

    def values(self, layer: int) -> Tensor:
        """Values of one layer as a view [num_blocks, block_size, kv_heads, value_dim]."""
        return self._blocked(self.flat_values(layer))

    def flat_keys(self, layer: int) -> Tensor:
        """Keys of one layer by slot, as they lie in memory: [kv_heads, num_blocks * block_size, key_dim]."""
        return self._keys.layers[layer]

    def flat_values(self, layer: int) -> Tensor:
        """Values of one layer by slot, as they lie in memory: [kv_heads, num_blocks * block_size, value_dim]."""
        return self._values.layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] at slots [T]."""
        self.flat_keys(layer).index_copy_(1, slots, key)
        self.flat_values(layer).index_copy_(1, slots, value)

    def runs(self, start: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Slots [start, start + length) of every layer as views: keys [1, kv_heads, length, key_dim] and values."""
        return list(zip(self._keys.runs(start, length), self._values.runs(start, length), strict=True))

    def fill_(self, value: float) -> None:
        """Overwrite everything, the trash block included; tests fill with NaN to catch reads of unwritten slots."""
        for stack in (*self._keys.stacks, *self._values.stacks):
            stack.fill_(value)

    def _blocked(self, flat: Tensor) -> Tensor:
        heads, _, dim = flat.shape
        return flat.view(heads, self.num_blocks, self.block_size, dim).permute(1, 2, 0, 3)


class _Stacks:
    """One tensor [layers, 1, heads, slots, dim] for each distinct (heads, dim), and the place of each layer in them."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        members: dict[tuple[int, int], list[int]] = {}
        for layer, shape in enumerate(shapes):
            members.setdefault(shape, []).append(layer)
        self.stacks = [
            torch.empty(len(layers), 1, heads, num_slots, dim, dtype=dtype, device=device)
            for (heads, dim), layers in members.items()
        ]
        order = [layer for layers in members.values() for layer in layers]
        self._place = [order.index(layer) for layer in range(len(shapes))]
        self.layers = [view[0] for view in self._in_order(self.stacks)]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)

    def runs(self, start: int, length: int) -> list[Tensor]:
        return self._in_order([stack.narrow(3, start, length) for stack in self.stacks])

    def _in_order(self, stacks: list[Tensor]) -> list[Tensor]:
        views = [view for stack in stacks for view in stack.unbind(0)]
        return [views[place] for place in self._place]
