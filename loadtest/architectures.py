"""Tiny random models of the families that are served, each with the feature of its attention switched on."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DROP = object()  # takes an option out of the common ones
GPT2_NAMES = dict.fromkeys(
    (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
    ),
    DROP,
)
"""Takes out the options that GPT-2 and others of its time name otherwise."""
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": DROP,
}
_MLA_MOE: dict[str, Any] = {
    **_MLA,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}

# What each architecture wants otherwise than _COMMON. Windows and chunks are shorter than the tests' sequences.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING},
    "phi3": {"head_dim": DROP, "sliding_window": 7, "original_max_position_embeddings": 256},
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_neox": {"head_dim": DROP, "num_key_value_heads": DROP},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "hidden_size": DROP,
        **GPT2_NAMES,
    },
    "opt": {
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "head_dim": DROP,
        "num_key_value_heads": DROP,
        "intermediate_size": DROP,
    },
    "granite": {"head_dim": DROP, "logits_scaling": 3.0, "attention_multiplier": 0.2},
    "olmo2": {"head_dim": DROP},
    "cohere2": {"sliding_window": 6, "logit_scale": 0.5, "layer_types": _ALTERNATING},
    "starcoder2": {"head_dim": DROP, "sliding_window": 6},
    "glm4": {"partial_rotary_factor": 0.5},
    "smollm3": {},
    "deepseek_v2": _MLA_MOE,
    "deepseek_v3": _MLA_MOE,
    "minicpm3": {**_MLA, "dim_model_base": 16},
    "llama4_text": {
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 4,
        "attn_temperature_tuning": True,
        "floor_scale": 5,
    },
}

ROUTED = frozenset({"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text"})
"""Families whose tokens go to experts: a near tie may send one elsewhere when numbers are rounded differently."""


def tiny_config(architecture: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of a few ten thousand weights; `changes` override what this file chooses."""
    options = {**_COMMON, **ARCHITECTURES.get(architecture, {}), **changes}
    return CONFIG_MAPPING[architecture](**{name: value for name, value in options.items() if value is not DROP})


def tiny_model(architecture: str, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """An unmodified eager float32 model with random weights, large enough that wrong attention shows in the logits."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                spread = 0.5 if "embed" in name else 0.6 / math.sqrt(parameter.shape[-1])
                parameter.copy_(torch.randn_like(parameter) * spread)
            elif "sink" in name:
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
