"""How many bytes the cache of a token takes: the KV-cache formula for MHA, GQA, MQA and MLA.

    bytes per token = sum over layers of  (key values + value values) * bytes per element

with `kv_heads * head_dim` key values and as many value values in a layer of multi-head (kv_heads = heads), grouped
(kv_heads < heads) or multi-query attention (kv_heads = 1); a layer of multi-head latent attention stores one latent of
`kv_lora_rank` and one rotary part of `rope_dim` values, once and not twice (DeepSeek-V2, arXiv:2405.04434, section
2.1). A quantised cache has a scale beside each head's key and value; one that evicts by attention, a score beside each
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

SCORE_BYTES = 4

ENDLESS = 2**31 - 1
"""More tokens than any sequence has."""


class AttentionKind(StrEnum):
    """What the heads of a layer share."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """How a number is stored. scale_bytes: of the factor that a token's key, and its value, has in each head."""

    name: str
    element_bytes: int
    scale_bytes: int = 0


CACHE_DTYPES = {
    dtype.name: dtype
    for dtype in (
        CacheDtype("float32", 4),
        CacheDtype("bfloat16", 2),
        CacheDtype("float16", 2),
        CacheDtype("int8", 1, 4),
        CacheDtype("fp8", 1, 4),
    )
}


WEIGHT_DTYPES = tuple(name for name, dtype in CACHE_DTYPES.items() if not dtype.scale_bytes)
"""Those in which a model computes, and which therefore need no scale."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which earlier keys a query may see: those less than `window` back, those in its own span of `chunk` positions.

    Keys and queries are counted by their index in the sequence's cache; None sets no limit.
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, query: int) -> int:
        """Index of the first key that the query at index `query` sees; it sees all from there up to itself."""
        start = 0
        if self.window is not None:
            start = max(start, query - self.window + 1)
        if self.chunk is not None:
            start = max(start, query - query % self.chunk)
        return start

    @property
    def reach(self) -> int | None:
        """Most keys that a query sees, itself included; None for no limit."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)


EVERYTHING = Visibility()


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer stores for one token: `kv_heads` keys of `key_dim` and values of `value_dim`.

    For a latent layer `kv_heads` is 1, `key_dim` is `kv_lora_rank + rope_dim` and `value_dim` is 0.

    rope_dim: how many of a latent key's last numbers are its rotary part, which has a scale of its own.
    """

    kind: AttentionKind
    kv_heads: int
    key_dim: int
    value_dim: int
    rope_dim: int = 0

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)

    def bytes_per_token(self, dtype: CacheDtype, scored: bool = False) -> int:
        """Stored for one token: the elements, two scales a head (key and value, or latent and rotary part), a score."""
        per_head = 2 * dtype.scale_bytes + (SCORE_BYTES if scored else 0)
        return self.elements_per_token * dtype.element_bytes + self.kv_heads * per_head


def attention_kind(heads: int, kv_heads: int) -> AttentionKind:
    """Name the sharing of a layer with `heads` query heads and `kv_heads` stored heads."""
    if kv_heads == heads:
        return AttentionKind.MHA
    return AttentionKind.MQA if kv_heads == 1 else AttentionKind.GQA


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Layers that share a block table, since they forget at the same pace. `layers`: their indices."""

    layers: tuple[int, ...]
    visibility: Visibility = EVERYTHING


def group_layers(layers: Sequence[LayerLayout], visibilities: Sequence[Visibility]) -> tuple[TableGroup, ...]:
    """Divide layers into groups with a block table each, so that blocks no layer of a group can see are freed.

    All groups take their blocks from one pool, so a block must serve any of them: it holds as many layers of one as of
    another, a few places empty in the last group of a kind, and layers that store different widths are not divided.
    The number of layers in a group divides that of the farthest-sighted layers, whose cache is the one that grows.
    """
    everything = (TableGroup(tuple(range(len(layers)))),)
    kinds: dict[Visibility, list[int]] = {}
    for index, visibility in enumerate(visibilities):
        kinds.setdefault(visibility, []).append(index)
    if len(kinds) == 1:
        return (TableGroup(everything[0].layers, visibilities[0]),)
    if len(set(layers)) > 1:
        return everything
    farthest = max(kinds, key=lambda kind: (kind.reach is None, kind.reach or 0))
    fewest = min(map(len, kinds.values()))
    size = max(count for count in range(1, fewest + 1) if len(kinds[farthest]) % count == 0)
    return tuple(
        TableGroup(tuple(members[start : start + size]), kind)
        for kind, members in sorted(kinds.items(), key=lambda item: item[0] is not farthest)
        for start in range(0, len(members), size)
    )


def held_blocks(visibility: Visibility, num_tokens: int, block_size: int, step_tokens: int = 1) -> int:
    """Most blocks that a sequence of `num_tokens` tokens holds at a time in a group, computed `step_tokens` at a time.

    A step needs `reach - 1` keys before its own and may begin anywhere in a block: at worst only the first of them lies
    in the first block.
    """
    blocks = -(-num_tokens // block_size)
    if visibility.reach is None:
        return blocks
    return min(blocks, -(-(visibility.reach - 2 + step_tokens) // block_size) + 1)


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a whole model: its layers, how numbers are stored, the tokens of a block.

    visibilities: what each layer sees; empty where all see everything.
    scored: whether each head of a token has a score, for eviction by attention.
    """

    layers: tuple[LayerLayout, ...]
    dtype: CacheDtype
    block_size: int
    visibilities: tuple[Visibility, ...] = ()
    scored: bool = False

    @cached_property
    def groups(self) -> tuple[TableGroup, ...]:
        """Which layers share a block table."""
        return group_layers(self.layers, self.visibilities or (EVERYTHING,) * len(self.layers))

    @property
    def takes_budgets(self) -> bool:
        """Whether sequences may give tokens up: a window or chunk counts them, and would see others than it should."""
        return all(visibility == EVERYTHING for visibility in self.visibilities)

    @property
    def bytes_per_token(self) -> int:
        """Of a token that every layer still sees."""
        return sum(layer.bytes_per_token(self.dtype, self.scored) for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """A block serves the layers of any one group, so it has as many places as the largest has layers."""
        places = max(len(group.layers) for group in self.groups)
        layers = self.layers if len(self.groups) == 1 else self.layers[:places]
        return self.block_size * sum(layer.bytes_per_token(self.dtype, self.scored) for layer in layers)

    def blocks_for(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Most blocks that one sequence of `num_tokens` tokens holds at a time, computed `step_tokens` at a time."""
        return sum(held_blocks(group.visibility, num_tokens, self.block_size, step_tokens) for group in self.groups)
