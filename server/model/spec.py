"""What a layer's attention is, as the probe saw it, and what such a layer stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.kvpool.layout import AttentionKind, CacheDtype, CacheLayout, LayerLayout, Visibility, attention_kind
from server.model.errors import ModelLoadError


class UnsupportedModel(ModelLoadError):
    """The model loads, but could only be served wrongly. The message says in one sentence why."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, as backends compute it.

    scale: factor of the scores before the soft-cap.
    window: a query sees this many keys, itself included (sliding window).
    chunk: a query sees only keys of its own span of so many positions (Llama 4's chunked attention).
    softcap: scores s become `softcap * tanh(s / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
    has_sink: each head has a logit that takes part in the softmax and has no value (gpt-oss).
    latent_rank: in a latent layer, how many numbers of a key are the latent, before its rotary part. All query heads
        share one KV head, whose values are its keys: the matrices that expand the latent are applied to the queries
        before and to the outputs after (`server.model.latent`).
    """

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sink: bool = False
    latent_rank: int | None = None

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.window, self.chunk)

    @property
    def layout(self) -> LayerLayout:
        """What the layer stores for a token."""
        if self.latent_rank is not None:
            return LayerLayout(AttentionKind.MLA, 1, self.key_dim, 0, self.key_dim - self.latent_rank)
        kind = attention_kind(self.num_heads, self.num_kv_heads)
        return LayerLayout(kind, self.num_kv_heads, self.key_dim, self.value_dim)


def cache_layout(specs: Sequence[LayerSpec], dtype: CacheDtype, block_size: int, scored: bool = False) -> CacheLayout:
    """The cache of a model with these layers."""
    return CacheLayout(
        tuple(spec.layout for spec in specs), dtype, block_size, tuple(spec.visibility for spec in specs), scored
    )
