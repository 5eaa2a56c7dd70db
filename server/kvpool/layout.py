"""How many bytes the cache of a token takes: the KV-cache formula for MHA, GQA, MQA and MLA.

    bytes per token = sum over layers of  (key values + value values) * bytes per element

with `kv_heads * head_dim` key values and as many value values in a layer of multi-head (kv_heads = heads), grouped
(kv_heads < heads) or multi-query attention (kv_heads = 1); a layer of multi-head latent attention stores one latent of
`kv_lora_rank` and one rotary part of `rope_dim` values, once and not twice (DeepSeek-V2, arXiv:2405.04434, section
2.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AttentionKind(StrEnum):
    """What the heads of a layer share."""

    MHA = "MHA"
    GQA = "GQA"
    MQA = "MQA"
    MLA = "MLA"


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer stores for one token: `kv_heads` keys of `key_dim` values and values of `value_dim`.

    For a latent layer `kv_heads` is 1, `key_dim` is `kv_lora_rank + rope_dim` and `value_dim` is 0.
    """

    kind: AttentionKind
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def attention_kind(heads: int, kv_heads: int) -> AttentionKind:
    """Name the sharing of a layer with `heads` query heads and `kv_heads` stored heads."""
    if kv_heads == heads:
        return AttentionKind.MHA
    return AttentionKind.MQA if kv_heads == 1 else AttentionKind.GQA


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of a whole model: its layers, the bytes of an element and the tokens of a block."""

    layers: tuple[LayerLayout, ...]
    element_bytes: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return self.element_bytes * sum(layer.elements_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)
