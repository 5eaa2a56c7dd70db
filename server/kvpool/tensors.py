"""The pool's memory: keys and values of all blocks, for every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.kvpool.layout import CacheLayout


class KVTensors:
    """Keys [num_blocks, block_size, kv_heads, key_dim] and values [.., value_dim] of each layer.

    In memory the heads come first, so that a run of consecutive blocks is, for each head, one dense matrix
    [tokens, dim]: torch's CPU kernel reads such runs in place, about 1.5 times as fast as rows that are kv_heads * dim
    apart. Layers of one shape share a tensor, so that a run can be sliced for all of them at once; layers at the same
    place of different table groups share their memory, since a block belongs to one group at a time. A latent layer has
    no values of its own: they are its keys.

    The trash block starts zeroed, since the step that measures memory attends to it; the rest starts with whatever was
    there, so that a start does not wait for gigabytes to be written. Readers must never let a slot beyond a sequence's
    length, nor the trash block 0, reach a result: a factor of zero does not stop a NaN.

    scores: for each layer [kv_heads, num_blocks * block_size] float32, the attention that a slot has had, where
        `layout.scored`; else None.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least the trash block, got num_blocks={num_blocks}")
        self.layout = layout
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        layers, slots = layout.layers, num_blocks * layout.block_size
        places = _places(layout)
        self._keys = _Stacks([(layer.kv_heads, layer.key_dim) for layer in layers], places, slots, dtype, device)
        self._values = _Stacks([(layer.kv_heads, layer.value_dim) for layer in layers], places, slots, dtype, device)
        self._latent = [layer.value_dim == 0 for layer in layers]
        self._scores = (
            _Stacks([(layer.kv_heads, 1) for layer in layers], places, slots, torch.float32, device)
            if layout.scored
            else None
        )
        self.scores = None if self._scores is None else [layer[..., 0] for layer in self._scores.layers]
        for stack in self.storages:
            stack.narrow(3, 0, self.block_size).zero_()

    @property
    def storages(self) -> list[Tensor]:
        """All the memory there is, as tensors [layers, 1, kv_heads, num_blocks * block_size, width]."""
        return [storage for storage, _ in self.storages_with_layers]

    @property
    def storages_with_layers(self) -> list[tuple[Tensor, list[int]]]:
        """Each storage with the layers it is divided among, in order; of layers that share memory, the first."""
        parts = [self._keys, self._values] if self._scores is None else [self._keys, self._values, self._scores]
        pairs = [pair for part in parts for pair in zip(part.stacks, part.layers_of_stack, strict=True)]
        return [(stack, layers) for stack, layers in pairs if stack.numel()]

    @property
    def scores_with_layers(self) -> list[tuple[Tensor, list[int]]]:
        """The scores [layers, kv_heads, num_blocks * block_size] of all layers with as many heads, and which these are.

        Raises ValueError where the layout has none.
        """
        if self._scores is None:
            raise ValueError("the pool keeps no scores of attention")
        stacks = [stack[:, 0, ..., 0] for stack in self._scores.stacks]
        return list(zip(stacks, self._scores.layers_of_stack, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

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
        return (self._keys if self._latent[layer] else self._values).layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] at slots [T].

        Returns them as they will be read, which is what the step itself must attend to: what a token contributes does
        not depend on the step that computed it. A latent layer's value is not looked at.
        """
        self.flat_keys(layer).index_copy_(1, slots, key)
        if self._latent[layer]:
            return key, key
        self.flat_values(layer).index_copy_(1, slots, value)
        return key, value

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [kv_heads, n, key_dim] and values [kv_heads, n, value_dim] at slots [n], copied."""
        keys = self.flat_keys(layer).index_select(1, slots)
        return keys, keys if self._latent[layer] else self.flat_values(layer).index_select(1, slots)

    def reset_scores(self, slots: Tensor) -> None:
        """Nothing has attended to these slots [n] yet, in any layer."""
        if self._scores is not None:
            for stack in self._scores.stacks:
                stack.index_fill_(3, slots, 0.0)

    def runs(self, start: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Slots [start, start + length) of every layer as views: keys [1, kv_heads, length, key_dim] and values."""
        keys, values = self._keys.runs(start, length), self._values.runs(start, length)
        return [(key, key if latent else value) for key, value, latent in zip(keys, values, self._latent, strict=True)]

    def fill_(self, value: float) -> None:
        """Overwrite everything, the trash block included; tests fill with NaN to catch reads of unwritten slots."""
        for stack in self.storages:
            stack.fill_(value)

    def _blocked(self, flat: Tensor) -> Tensor:
        heads, _, dim = flat.shape
        return flat.view(heads, self.num_blocks, self.block_size, dim).permute(1, 2, 0, 3)


def _places(layout: CacheLayout) -> list[int]:
    """For each layer its place in a block: layers at the same place of different groups share their memory."""
    places = [0] * len(layout.layers)
    for group in layout.groups:
        for place, layer in enumerate(group.layers):
            places[layer] = place
    return places


class _Stacks:
    """One tensor [places, 1, heads, slots, dim] for each distinct (heads, dim), and where each layer is in them."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        places: Sequence[int],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        members: dict[tuple[int, int], list[int]] = {}
        for shape, place in zip(shapes, places, strict=True):
            if place not in members.setdefault(shape, []):
                members[shape].append(place)
        self.stacks = [
            torch.empty(len(inside), 1, heads, num_slots, dim, dtype=dtype, device=device)
            for (heads, dim), inside in members.items()
        ]
        order = [(shape, place) for shape, inside in members.items() for place in inside]
        entries = list(zip(shapes, places, strict=True))
        self.layers_of_stack = [
            [entries.index((shape, place)) for place in inside] for shape, inside in members.items()
        ]
        self._view_of_layer = [order.index(entry) for entry in entries]
        self.layers = [view[0] for view in self._in_order(self.stacks)]

    def runs(self, start: int, length: int) -> list[Tensor]:
        return self._in_order([stack.narrow(3, start, length) for stack in self.stacks])

    def _in_order(self, stacks: list[Tensor]) -> list[Tensor]:
        views = [view for stack in stacks for view in stack.unbind(0)]
        return [views[index] for index in self._view_of_layer]
