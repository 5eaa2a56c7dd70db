"""The bare loop draws what Hugging Face's own `generate` draws, with either cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.models.mistral import MistralConfig

from server.bench.bare import CacheKind, static_batch

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS = [LlamaConfig(**SHAPE), Qwen2Config(**SHAPE), MistralConfig(**SHAPE, sliding_window=6)]


@pytest.fixture(params=CONFIGS, ids=lambda config: config.model_type)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(request.param).eval()
    for parameter in built.parameters():
        parameter.data.normal_(0, 0.3)  # spread out, so that the likeliest token is never a near tie
    return built


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_static_batch_is_generate(model: PreTrainedModel, cache: CacheKind) -> None:
    prompts = torch.randint(1, 97, (3, 11))
    turn = static_batch(model, prompts, 9, cache)
    expected = model.generate(prompts, max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(prompts))
    assert turn.token_ids == expected[:, 11:].tolist()
    assert 0 < turn.prefill_seconds < turn.seconds
