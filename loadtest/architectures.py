"""Tiny random models of the families that are served, each with the feature of its attention switched on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = {"head_dim": 16}
_WINDOW = {"sliding_window": 6}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

MATRIX: Mapping[str, Mapping[str, Any]] = {
    "llama": _HEADS,
    "qwen2": {},
    "qwen3": _HEADS,
    "mistral": _HEADS | _WINDOW,
    "gemma2": _HEADS | _WINDOW | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": _HEADS | _WINDOW | {"query_pre_attn_scalar": 16},
    "phi3": _WINDOW | {"original_max_position_embeddings": 256},
    "mixtral": {"num_local_experts": 2},
    "qwen3_moe": _HEADS | _EXPERTS | {"num_experts": 4},
    "gpt_oss": _HEADS | _WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt_neox": {},
    "gpt2": {"n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "granite": {},
    "olmo2": {},
    "cohere2": _HEADS | _WINDOW,
    "starcoder2": _WINDOW,
    "glm4": _HEADS | {"partial_rotary_factor": 0.5},
    "smollm3": _HEADS,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}
ROUTED = frozenset({"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"})
"""Families whose tokens go to experts: a near tie may send one elsewhere when numbers are rounded differently."""


def build(name: str, seed: int) -> PreTrainedModel:
    """The model in float32 on the CPU, with transformers' own eager attention and weights of some spread.

    The usual small initial weights would leave all logits alike and hide errors. Raises KeyError where this
    transformers does not know the family.
    """
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[name](**_COMMON | dict(MATRIX[name]))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.train(False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "sinks" in parameter_name:
                parameter.copy_(noise)
            elif parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            elif parameter_name in ("lm_head.weight", "embed_out.weight"):
                parameter.copy_(noise * 3.0 / math.sqrt(parameter.shape[-1]))
            elif "embed" in parameter_name or parameter_name.endswith(("wte.weight", "wpe.weight")):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 0.6 / math.sqrt(parameter.shape[-1]))
    return model
