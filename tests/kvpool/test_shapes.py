"""Shapes read from configs, against what unmodified Hugging Face models really cache for a token."""

from __future__ import annotations

from typing import Any

import pytest

from server.kvpool.layout import CACHE_DTYPES, AttentionKind
from server.kvpool.shapes import UnknownShape, read_shape

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 16}
MOE = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {
    **TINY,
    **MOE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
}
GPT = {"vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 32, "n_ctx": 32, "rotary_dim": 4}

LAST_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": WIDE,
    "mixtral": {**GROUPED, **MOE},
    "qwen2": GROUPED,
    "qwen3": WIDE,
    "qwen3_moe": {**WIDE, **MOE},
    "gemma": {**WIDE, "num_key_value_heads": 1},
    "gemma2": {**WIDE, "num_hidden_layers": 4, "sliding_window": 4096},
    "gemma3_text": {**WIDE, "num_hidden_layers": 7},
    "phi": GROUPED,
    "phi3": GROUPED,
    "granite": GROUPED,
    "olmo2": GROUPED,
    "cohere2": {**WIDE, "num_hidden_layers": 4},
    "starcoder2": GROUPED,
    "glm4": WIDE,
    "smollm3": GROUPED,
    "gpt_oss": {**WIDE, **MOE},
    "nemotron": {**GROUPED, "head_dim": 8},
    "llama4_text": {**WIDE, **MOE, "intermediate_size_mlp": 32},
    "gpt2": GPT,
    "gptj": GPT,
    "codegen": {**GPT, "n_head": 8, "n_embd": 64},
    "gpt_bigcode": GPT,
    "gpt_neo": {**TINY, "num_layers": 2, "num_heads": 6, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox": TINY,
    "opt": {**TINY, "ffn_dim": 32, "word_embed_proj_dim": 48},
    "bloom": {"vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    "mpt": {"vocab_size": 64, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 32},
    "xglm": {"vocab_size": 64, "d_model": 48, "num_layers": 2, "attention_heads": 6, "ffn_dim": 32},
    "falcon": {**TINY, "multi_query": True, "new_decoder_architecture": False},
    "stablelm": GROUPED,
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "minicpm3": LATENT,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_what_hugging_face_caches(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(1)
    given = {"model_type": family, **FAMILIES[family]}
    config = AutoConfig.for_model(**given)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), past_key_values=cache, use_cache=True)
    cached = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
    for source in (given, config.to_dict()):
        shape = read_shape(source)
        assert len(shape.layers) == len(cached)
        for layer, (keys, values) in zip(shape.layers, cached, strict=True):
            layout = layer.layout
            if layout.kind is AttentionKind.MLA:  # cached as the latent and, in place of values, the rotary part
                assert (keys[1], values[1], layout.value_dim) == (1, 1, 0)
                assert layout.key_dim == keys[3] + values[3]
            else:
                assert (layout.kv_heads, layout.key_dim, layout.value_dim) == (keys[1], keys[3], values[3])


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "phi3", "gpt2", "gpt_bigcode", "deepseek_v2", "deepseek_v3", "minicpm3"]
)
def test_shape_is_what_the_server_finds_in_the_loaded_model(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from server.model.runner import ModelRunner

    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = {"model_type": family, **FAMILIES[family]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
    assert ModelRunner(model, "auto", 16).layout == read_shape(given).layout(CACHE_DTYPES["float32"], 16)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "cohere2", "mistral", "gpt_oss", "qwen2", "llama4_text"])
def test_windows_are_those_of_the_layer_types(family: str) -> None:
    """With and without the explicit list, which older configs lack."""
    from transformers import AutoConfig

    given = {"model_type": family, **FAMILIES[family], "sliding_window": 7, "attention_chunk_size": 5}
    config = AutoConfig.for_model(**given).to_dict()
    window = {"sliding_attention": 7, "chunked_attention": 5, "full_attention": None}
    types = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    listed = {**given, "layer_types": types, "use_sliding_window": family != "qwen2"}
    assert [layer.visibility.reach for layer in read_shape(listed).layers] == [window[name] for name in types]
    if family not in ("gpt_oss", "llama4_text"):  # these have always listed their layers, or never said by a pattern
        unlisted = {**given, "use_sliding_window": False} if family == "qwen2" else given
        assert [layer.visibility.reach for layer in read_shape(unlisted).layers] == [window[name] for name in types]


def test_upper_layers_slide_where_a_config_says_from_which_one_on() -> None:
    shape = read_shape(
        {**GROUPED, "num_hidden_layers": 4, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}
    )
    assert [layer.visibility.window for layer in shape.layers] == [None, None, None, 9]


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        pytest.param({**TINY, "model_type": "falcon"}, 1, id="falcon 7b: multi-query unless told otherwise"),
        pytest.param({**TINY, "model_type": "falcon", "multi_query": False}, 6, id="falcon rw"),
        pytest.param(
            {**TINY, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2},
            2,
            id="falcon 40b",
        ),
        pytest.param({**TINY, "model_type": "RefinedWeb", "n_head_kv": 2}, 2, id="falcon 40b, first form"),
        pytest.param({**TINY, "model_type": "gpt_bigcode", "multi_query": False}, 6, id="bigcode multi-head"),
        pytest.param(
            {**TINY, "model_type": "chatglm", "multi_query_attention": True, "multi_query_group_num": 2},
            2,
            id="chatglm",
        ),
        pytest.param(
            {**TINY, "model_type": "chatglm", "multi_query_attention": False, "multi_query_group_num": 2},
            6,
            id="chatglm multi-head",
        ),
        pytest.param({**TINY, "attn_config": {"kv_n_heads": 3}}, 3, id="dbrx"),
        pytest.param({**TINY, "attn_config": {"attn_type": "multiquery_attention"}}, 1, id="mpt multi-query"),
        pytest.param({**TINY, "num_key_value_heads": None}, 6, id="null is multi-head"),
        pytest.param({"model_type": "vision", "text_config": GROUPED, "num_hidden_layers": 99}, 2, id="nested"),
    ],
)
def test_spellings_of_shared_heads(config: dict[str, Any], kv_heads: int) -> None:
    assert [layer.layout.kv_heads for layer in read_shape(config).layers] == [kv_heads, kv_heads]


def test_layers_may_differ() -> None:
    listed = read_shape({**TINY, "head_dim": 8, "num_query_heads": None, "num_kv_heads": [2, 3]})
    assert [layer.layout.kv_heads for layer in listed.layers] == [2, 3]
    mixed = read_shape(
        {
            **GROUPED,
            "head_dim": 16,
            "v_head_dim": 8,
            "swa_num_key_value_heads": 3,
            "swa_head_dim": 12,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    assert [(layer.layout.kv_heads, layer.key_dim, layer.value_dim) for layer in mixed.layers] == [
        (3, 12, 8),
        (2, 16, 8),
    ]
    wide = read_shape({**WIDE, "global_head_dim": 32, "num_global_key_value_heads": 1, **LAST_FULL})
    assert [(layer.layout.kv_heads, layer.key_dim) for layer in wide.layers] == [(2, 16), (1, 32)]


def test_layers_without_attention_have_no_cache() -> None:
    shape = read_shape({**GROUPED, "linear_num_key_heads": 2, "layer_types": ["linear_attention", "full_attention"]})
    assert len(shape.layers) == 1
    assert shape.uncached_layers == 1


def test_what_else_is_read() -> None:
    shape = read_shape({**TINY, "model_type": "x", "torch_dtype": "bfloat16", "max_position_embeddings": 77})
    assert (shape.model_type, shape.dtype, shape.max_length) == ("x", "bfloat16", 77)
    assert read_shape({"torch_dtype": "float16", "text_config": TINY}).dtype == "float16"
    assert read_shape(TINY).max_length is None


def test_sharing_keeps_the_expanded_widths() -> None:
    layer = read_shape(LATENT).sharing(None).layers[0].layout
    assert (layer.kind, layer.kv_heads, layer.key_dim, layer.value_dim) == (AttentionKind.MHA, 6, 16, 14)
    assert read_shape(GROUPED).sharing(1).layers[0].layout.kind is AttentionKind.MQA


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8}, "no attention heads"),
        ({**TINY, "is_encoder_decoder": True}, "decoder-only"),
        ({**TINY, "num_kv_shared_layers": 1}, "reuse the cache"),
        ({**TINY, "layer_types": ["compressed_attention", "full_attention"]}, "compressed_attention"),
        ({**TINY, "layer_types": ["full_attention"]}, "types of 1 layers and has 2"),
        ({**TINY, "layer_types": ["mamba", "mamba"]}, "nothing to cache"),
        ({**TINY, "attn_layer_period": 4}, "add layer_types"),
        ({**TINY, "hidden_size": 50}, "does not divide"),
        ({**TINY, "num_key_value_heads": 4}, "cannot share 4 KV heads"),
        ({**TINY, "num_hidden_layers": 0}, "positive whole number, not 0"),
        ({**TINY, "num_hidden_layers": "two"}, "not 'two'"),
        ({**TINY, "head_dim": -8}, "not -8"),
        ({**LATENT, "v_head_dim": None}, "v_head_dim"),
        ({"num_attention_heads": 4, "hidden_size": 8}, "num_hidden_layers"),
    ],
)
def test_what_the_formula_is_not_about_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownShape, match=message):
        read_shape(config)
