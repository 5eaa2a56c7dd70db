"""What a model's layers store for a token, read from its config.json alone.

For planning only: a running server asks the loaded model (`server.model.probe`), because a config may say one thing and
the code another. Families spell the same number differently; the spellings are the tables below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from server.kvpool.layout import (
    EVERYTHING,
    AttentionKind,
    CacheDtype,
    CacheLayout,
    LayerLayout,
    Visibility,
    attention_kind,
)

Config: TypeAlias = Mapping[str, Any]

_NESTED = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
_LENGTH = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_TYPES = ("layer_types", "layers_block_type", "attention_layers")

_FULL = {"full_attention", "attention", "global"}
_WINDOWED = {  # and where the config says how far they look back
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "local": "window_size",
}
_NO_CACHE = {"linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"}
_RECURRENT = ("mamba", "ssm_", "linear_num_", "conv_L_cache", "lru_width", "attn_layer_", "full_attention_interval")

_MULTI_QUERY = {"falcon", "gpt_bigcode", "RefinedWebModel"}  # families whose multi_query is true where it is not given
_TWO_ATTENTIONS = {"longcat_flash"}
_PATTERNS = {"gemma2": 2, "cohere2": 4, "gemma3": 6, "gemma3_text": 6}  # every nth layer sees everything


class UnknownShape(ValueError):
    """The config does not say what a token of this model takes, or says it of something the formula is not about."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of attention: `heads` query heads, keys of `key_dim` and values of `value_dim` for each of them.

    layout: what is stored. visibility: how far back the layer looks.
    """

    heads: int
    key_dim: int
    value_dim: int
    layout: LayerLayout
    visibility: Visibility = EVERYTHING

    def sharing(self, kv_heads: int) -> LayerShape:
        """The same layer if it stored `kv_heads` heads, each shared by as many query heads."""
        kind = attention_kind(self.heads, kv_heads)
        return replace(self, layout=LayerLayout(kind, kv_heads, self.key_dim, self.value_dim))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The layers of a model that have a cache, in order, and what else its config says.

    uncached_layers: layers without one (recurrent ones keep a state of fixed size, which is not counted here).
    max_length: the longest sequence, prompt and output; dtype: of the checkpoint. None where the config is silent.
    """

    model_type: str
    layers: tuple[LayerShape, ...]
    uncached_layers: int = 0
    max_length: int | None = None
    dtype: str | None = None

    def layout(self, dtype: CacheDtype, block_size: int, scored: bool = False) -> CacheLayout:
        layouts, visibilities = zip(*((layer.layout, layer.visibility) for layer in self.layers), strict=True)
        return CacheLayout(layouts, dtype, block_size, visibilities, scored)

    def sharing(self, kv_heads: int | None) -> ModelShape:
        """The same model with `kv_heads` stored heads in each layer; None is multi-head, one for each query head."""
        return replace(self, layers=tuple(layer.sharing(kv_heads or layer.heads) for layer in self.layers))


def read_shape(config: Config) -> ModelShape:
    """Read the content of a config.json. Raises UnknownShape with what is missing or does not fit."""
    inner = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), config)
    attention = {**inner, **_mapping(inner, "attn_config")}
    model_type = str(inner.get("model_type") or config.get("model_type") or "unknown")
    if inner.get("is_encoder_decoder") or inner.get("cross_attention_layers"):
        raise UnknownShape(f"{model_type} attends across to an encoder; this server runs decoder-only models")
    if _first(attention, _HEADS) is None:
        raise UnknownShape(f"{model_type} has no attention heads ({' or '.join(_HEADS[:3])}), so nothing to cache")
    if inner.get("num_kv_shared_layers"):
        raise UnknownShape(f"{model_type} has layers that reuse the cache of others; the formula does not cover that")
    types = _layer_types(inner, model_type)
    layers = tuple(
        _layer(attention, model_type, index, layer_type)
        for index, layer_type in enumerate(types)
        if layer_type not in _NO_CACHE
    )
    if not layers:
        raise UnknownShape(f"no layer of {model_type} has attention, so there is nothing to cache")
    length = _first(inner, _LENGTH)
    dtype = _first(inner, ("dtype", "torch_dtype")) or _first(config, ("dtype", "torch_dtype"))
    return ModelShape(
        model_type,
        layers * (2 if model_type in _TWO_ATTENTIONS else 1),
        uncached_layers=len(types) - len(layers),
        max_length=None if length is None else _positive(length, "/".join(_LENGTH[:2])),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _layer_types(config: Config, model_type: str) -> Sequence[str]:
    count, listed = _first(config, _LAYERS), _first(config, _TYPES)
    if listed is not None:
        if count is not None and len(listed) != count:
            raise UnknownShape(f"{model_type} lists the types of {len(listed)} layers and has {count}")
        if unknown := set(listed) - _FULL - _NO_CACHE - _WINDOWED.keys():
            raise UnknownShape(f"the formula does not cover layers of the type {', '.join(sorted(unknown))}")
        return [str(name) for name in listed]
    count = _positive(count, " or ".join(_LAYERS[:4]))
    if recurrent := [key for key in config if key.startswith(_RECURRENT) and config[key]]:
        raise UnknownShape(
            f"{model_type} mixes attention with other layers (it sets {recurrent[0]}) and does not list which is "
            "which: add layer_types to its config.json"
        )
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(model_type)
    first = config.get("max_window_layers", count) if config.get("use_sliding_window") else 0
    return [
        "full_attention" if index < first or (pattern and (index + 1) % pattern == 0) else "sliding_attention"
        for index in range(count)
    ]


def _layer(config: Config, model_type: str, index: int, layer_type: str) -> LayerShape:
    own = _of_type(config, layer_type)
    heads = _positive(_at(_first(own, _HEADS), index), "/".join(_HEADS[:3]))
    visibility = _visibility(own, layer_type)
    if config.get("kv_lora_rank"):
        rope = _positive(config.get("qk_rope_head_dim"), "qk_rope_head_dim")
        latent = _positive(config["kv_lora_rank"], "kv_lora_rank")
        return LayerShape(
            heads,
            _positive(config.get("qk_nope_head_dim"), "qk_nope_head_dim") + rope,
            _positive(config.get("v_head_dim"), "v_head_dim"),
            LayerLayout(AttentionKind.MLA, 1, latent + rope, 0, rope),
            visibility,
        )
    key_dim = _first(own, _HEAD_DIM)
    if key_dim is None:
        hidden = _positive(_first(own, _HIDDEN), "/".join(_HIDDEN[:3]))
        if hidden % heads:
            raise UnknownShape(f"{model_type} gives no head_dim, and {hidden} does not divide by its {heads} heads")
        key_dim = hidden // heads
    key_dim = _positive(key_dim, "head_dim")
    kv_heads = _kv_heads(own, model_type, heads, index)
    if heads % kv_heads:
        raise UnknownShape(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    value_dim = _positive(own.get("v_head_dim") or key_dim, "v_head_dim")
    layout = LayerLayout(attention_kind(heads, kv_heads), kv_heads, key_dim, value_dim)
    return LayerShape(heads, key_dim, value_dim, layout, visibility)


def _visibility(config: Config, layer_type: str) -> Visibility:
    name = _WINDOWED.get(layer_type)
    if name is None:
        return EVERYTHING
    limit = _positive(config.get(name), name)
    return Visibility(chunk=limit) if layer_type == "chunked_attention" else Visibility(window=limit)


def _of_type(config: Config, layer_type: str) -> Config:
    """The config with what it says of layers of this type alone in place of what it says of all."""
    if layer_type in _WINDOWED:
        special = {key.removeprefix("swa_"): value for key, value in config.items() if key.startswith("swa_")}
    else:
        special = {
            "head_dim": config.get("global_head_dim"),
            "num_key_value_heads": config.get("num_global_key_value_heads"),
        }
    return {**config, **{key: value for key, value in special.items() if value is not None}}


def _kv_heads(config: Config, model_type: str, heads: int, index: int) -> int:
    if not config.get("new_decoder_architecture"):  # Falcon's, where num_kv_heads holds whatever multi_query says
        if config.get("multi_query", model_type in _MULTI_QUERY) or config.get("attn_type") == "multiquery_attention":
            return 1
        if model_type in _MULTI_QUERY or config.get("multi_query_attention") is False:
            return heads
    found = _at(_first(config, _KV_HEADS), index)
    return heads if found is None else _positive(found, "num_key_value_heads")


def _first(config: Config, names: Sequence[str]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _at(value: Any, index: int) -> Any:
    """The layer's own entry where a config gives one number for each layer."""
    return value[index] if isinstance(value, list) else value


def _mapping(config: Config, name: str) -> Config:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _positive(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnknownShape(f"{name} in the config must be a positive whole number, not {value!r}")
    return value
