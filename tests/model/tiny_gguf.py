"""Writes a Llama as a GGUF file the way llama.cpp's converter does, so that reading it back has something to equal."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

END = "<|end|>"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*LETTERS, "th", END]
HEADS, KV_HEADS = 4, 2


def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        eos_token_id=len(TOKENS) - 1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def write_gguf(
    path: Path, model: LlamaForCausalLM, quantize: gguf.GGMLQuantizationType | None = None, **more: Any
) -> Path:
    """Write `model`; matrices are quantised, and set in `model` to what they then stand for, where `quantize` is given.

    more: further header fields, dots written as double underscores.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in more.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key.replace("__", "."), value)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy().copy()
        if quantize is not None and value.ndim > 1:
            raw = gguf.quants.quantize(value, quantize)
            value = gguf.quants.dequantize(raw, quantize)
            parameter.data.copy_(torch.from_numpy(value))
        value = _interleave(value, name)
        stem, _, kind = name.rpartition(".")
        target = f"{names.get_name(stem)}.{kind}"
        if quantize is not None and value.ndim > 1:
            writer.add_tensor(target, gguf.quants.quantize(value, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(target, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(value: np.ndarray, name: str) -> np.ndarray:
    """llama.cpp rotates neighbouring pairs where transformers rotates halves, so it stores Q and K rows interleaved."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return value
    return value.reshape(heads, 2, value.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
