"""The pool's memory: keys and values of all blocks, for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from server.kvpool.layout import CacheDtype, CacheLayout, LayerLayout
from server.kvpool.quantise import dequantise, one, quantise, storage_dtype, unscaled

UNPACKED_NUMBERS = 2**19
"""How many are unpacked at a time: so few that they are still in the processor's cache when they are scaled."""


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

    Numbers are stored as the layout says, and read and written in the type that the model computes in, `dtype`. Where
    the two are one (`in_place`), the memory itself can be read: `keys`, `values`, `flat_keys`, `flat_values` and `runs`
    are views of it. Elsewhere they raise TypeError, and a reader gathers what it needs (`read`) or has the blocks that
    it needs laid out (`unpack`).

    scores: for each layer [kv_heads, num_blocks * block_size] float32, the attention that a slot has had, where
        `layout.scored`; else None.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        """one_at_a_time: all layers of a shape share their memory, as only one of them at a time has anything in it."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least the trash block, got num_blocks={num_blocks}")
        self.layout = layout
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        layers, slots = layout.layers, num_blocks * layout.block_size
        places = [0] * len(layers) if one_at_a_time else _places(layout)
        self.dtype = dtype
        self._keys = _Store(
            [(layer.kv_heads, _key_parts(layer)) for layer in layers], places, slots, layout.dtype, dtype, device
        )
        self._values = _Store(
            [(layer.kv_heads, _value_parts(layer)) for layer in layers], places, slots, layout.dtype, dtype, device
        )
        self.in_place = self._keys.in_place
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
        parts = [*self._keys.parts, *self._values.parts, *([] if self._scores is None else [self._scores])]
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
        return self._keys.in_memory.layers[layer]

    def flat_values(self, layer: int) -> Tensor:
        """Values of one layer by slot, as they lie in memory: [kv_heads, num_blocks * block_size, value_dim]."""
        return (self._keys if self._latent[layer] else self._values).in_memory.layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key [kv_heads, T, key_dim] and value [kv_heads, T, value_dim] at slots [T].

        Returns them as they will be read, which is what the step itself must attend to: what a token contributes does
        not depend on the step that computed it. A latent layer's value is not looked at.
        """
        key = self._keys.write(layer, slots, key)
        return key, key if self._latent[layer] else self._values.write(layer, slots, value)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [kv_heads, n, key_dim] and values [kv_heads, n, value_dim] at slots [n], copied, in the
        type that the model computes in."""
        keys = self._keys.read(layer, slots)
        return keys, keys if self._latent[layer] else self._values.read(layer, slots)

    @cached_property
    def unpacked(self) -> KVTensors:
        """Memory in which one layer at a time can be read in place, with room for as many blocks as the pool has.

        What no step has needed yet has no pages of main memory.
        """
        layout = replace(self.layout, dtype=unscaled(self.dtype), scored=False)
        return KVTensors(layout, self.num_blocks, self.dtype, self.device, one_at_a_time=True)

    def unpack(self, layer: int, blocks: Tensor) -> None:
        """Lay keys and values of blocks [n], each named once, out as the first n blocks of the layer in `unpacked`."""
        target, size = self.unpacked, self.block_size
        stores = [(self._keys, target.flat_keys(layer))]
        if not self._latent[layer]:
            stores.append((self._values, target.flat_values(layer)))
        start, widest = 0, max(flat.shape[0] * flat.shape[2] for _, flat in stores)
        for piece in blocks.split(max(1, UNPACKED_NUMBERS // (size * widest))):
            length = len(piece) * size
            for store, flat in stores:
                store.unpack(layer, piece, size, flat.narrow(1, start, length))
            start += length

    def reset_scores(self, slots: Tensor) -> None:
        """Nothing has attended to these slots [n] yet, in any layer."""
        if self._scores is not None:
            for stack in self._scores.stacks:
                stack.index_fill_(3, slots, 0.0)

    def runs(self, start: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Slots [start, start + length) of every layer as views: keys [1, kv_heads, length, key_dim] and values."""
        keys, values = self._keys.in_memory.runs(start, length), self._values.in_memory.runs(start, length)
        return [(key, key if latent else value) for key, value, latent in zip(keys, values, self._latent, strict=True)]

    def fill_(self, value: float) -> None:
        """Make everything read as `value`, the trash block included; tests fill with NaN to catch reads of unwritten
        slots."""
        for store in (self._keys, self._values):
            store.fill_(value)
        if self._scores is not None:
            for stack in self._scores.stacks:
                stack.fill_(value)

    def _blocked(self, flat: Tensor) -> Tensor:
        heads, _, dim = flat.shape
        return flat.view(heads, self.num_blocks, self.block_size, dim).permute(1, 2, 0, 3)


def unpacked_bytes(layout: CacheLayout, dtype: torch.dtype) -> int:
    """What a block takes in `KVTensors.unpacked`, for a model that computes in `dtype`; 0 where that is not needed."""
    if storage_dtype(layout.dtype) == dtype:
        return 0
    keys = {(layer.kv_heads, layer.key_dim) for layer in layout.layers}
    values = {(layer.kv_heads, layer.value_dim) for layer in layout.layers}
    return layout.block_size * dtype.itemsize * sum(heads * dim for shapes in (keys, values) for heads, dim in shapes)


def _key_parts(layer: LayerLayout) -> tuple[int, ...]:
    """How many numbers of a key share a scale: all of them, or those of the latent and those of the rotary part."""
    return (layer.key_dim,) if layer.value_dim else (layer.key_dim - layer.rope_dim, layer.rope_dim)


def _value_parts(layer: LayerLayout) -> tuple[int, ...]:
    return (layer.value_dim,) if layer.value_dim else ()


def _places(layout: CacheLayout) -> list[int]:
    """For each layer its place in a block: layers at the same place of different groups share their memory."""
    places = [0] * len(layout.layers)
    for group in layout.groups:
        for place, layer in enumerate(group.layers):
            places[layer] = place
    return places


class _Store:
    """The keys, or the values, of all layers: what is stored of them, and their scales.

    shapes: of each layer its heads, and into how many numbers for each scale a row is divided.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, tuple[int, ...]]],
        places: Sequence[int],
        num_slots: int,
        stored: CacheDtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._widths = [widths for _, widths in shapes]
        self._dtype = dtype
        self._stored = stored
        self.in_place = storage_dtype(stored) == dtype
        self._data = _Stacks(
            [(heads, sum(widths)) for heads, widths in shapes], places, num_slots, storage_dtype(stored), device
        )
        self._scales = (
            _Stacks([(heads, len(widths)) for heads, widths in shapes], places, num_slots, torch.float32, device)
            if stored.scale_bytes
            else None
        )

    @property
    def parts(self) -> list[_Stacks]:
        return [self._data] if self._scales is None else [self._data, self._scales]

    @property
    def in_memory(self) -> _Stacks:
        """The rows themselves, where they are stored as the model computes."""
        if not self.in_place:
            raise TypeError(
                f"the cache is stored as {self._stored.name}: there are no {self._dtype} rows in its memory"
            )
        return self._data

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> Tensor:
        """Store rows [heads, T, dim] at slots [T], and return them as they will be read."""
        data = self._data.layers[layer]
        if self._scales is None:
            stored = rows.to(data.dtype)
            data.index_copy_(1, slots, stored)
            return stored.to(self._dtype)
        stored, scales = quantise(rows, self._widths[layer], data.dtype)
        data.index_copy_(1, slots, stored)
        self._scales.layers[layer].index_copy_(1, slots, scales)
        return dequantise(stored, scales, self._widths[layer], torch.empty_like(rows))

    def read(self, layer: int, slots: Tensor) -> Tensor:
        """Rows [heads, n, dim] at slots [n]."""
        data = self._data.layers[layer].index_select(1, slots)
        if self._scales is None:
            return data.to(self._dtype)
        scales = self._scales.layers[layer].index_select(1, slots)
        return dequantise(data, scales, self._widths[layer], torch.empty_like(data, dtype=self._dtype))

    def unpack(self, layer: int, blocks: Tensor, block_size: int, out: Tensor) -> None:
        """Write the rows of blocks [n] to out [heads, n * block_size, dim]."""
        data = _blocks(self._data.layers[layer], blocks, block_size)
        if self._scales is None:
            out.copy_(data)
        else:
            scales = _blocks(self._scales.layers[layer], blocks, block_size)
            dequantise(data, scales, self._widths[layer], out)

    def fill_(self, value: float) -> None:
        for stack in self._data.stacks:
            stack.fill_(value if self._scales is None else one(stack.dtype))
        if self._scales is not None:
            for stack in self._scales.stacks:
                stack.fill_(value)


def _blocks(memory: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Blocks [n] of memory [heads, slots, width], copied: [heads, n * block_size, width]."""
    heads, _, width = memory.shape
    # Whole blocks are copied several times as fast as their slots one by one.
    return memory.view(heads, -1, block_size * width).index_select(1, blocks).view(heads, -1, width)


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
