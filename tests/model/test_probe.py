"""What cannot be served is refused with the reason; what can be served is described as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3Config,
    LlamaForCausalLM,
    PreTrainedModel,
)

from loadtest.architectures import DROP, GPT2_NAMES, VOCAB, tiny_config, tiny_model
from server.kvpool.layout import AttentionKind
from server.model.attention.cpu import CpuBackend
from server.model.hook import UnexpectedAttention
from server.model.probe import probe
from server.model.runner import ModelRunner
from server.model.spec import UnsupportedModel
from server.model.trial import pack
from tests.model.paging import PagedSequences

BYPASSES = "compute attention themselves instead of through transformers' attention interface"
OTHER_STATE = "keep other state than keys and values"


def build(architecture: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: AutoModelForCausalLM.from_config(tiny_config(architecture, **changes))


def gemma3_with_vision() -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=tiny_config("gemma3_text").to_dict(), vision_config=vision)
    return AutoModelForCausalLM.from_config(config)


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "bloom": (build("bloom", n_layer=2, n_head=4, **GPT2_NAMES), f"2 of its 2 layers {BYPASSES}"),
    "falcon": (
        build("falcon", head_dim=DROP, num_key_value_heads=DROP, intermediate_size=DROP),
        f"3 of its 3 layers {BYPASSES}",
    ),
    "mpt": (build("mpt", d_model=64, n_heads=4, n_layers=2, hidden_size=DROP, **GPT2_NAMES), BYPASSES),
    "gpt_neo": (
        build("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], **GPT2_NAMES),
        BYPASSES,
    ),
    "mamba": (
        build("mamba", **{name: DROP for name in GPT2_NAMES if name != "num_hidden_layers"}),
        OTHER_STATE,
    ),
    "jamba": (build("jamba", num_experts=2), OTHER_STATE),
    "rwkv": (build("rwkv", num_attention_heads=DROP, num_key_value_heads=DROP, head_dim=DROP), OTHER_STATE),
    "qwen3_next": (
        build(
            "qwen3_next",
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        rf"{OTHER_STATE} \(linear_attention\)",
    ),
    "lfm2": (build("lfm2", block_auto_adjust_ff_dim=False, full_attn_idxs=[1]), rf"{OTHER_STATE} \(conv\)"),
    "bert": (build("bert", head_dim=DROP), "its attention is bidirectional"),
    "t5": (
        lambda: AutoModelForSeq2SeqLM.from_config(
            tiny_config("t5", d_kv=16, d_ff=64, num_layers=2, decoder_start_token_id=0)
        ),
        "encoder-decoder",
    ),
    "gemma3 with vision": (gemma3_with_vision, "multimodal"),
    "phimoe": (
        build(
            "phimoe",
            num_local_experts=2,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
                "short_mscale": 1.0,
                "long_mscale": 1.3,
            },
            original_max_position_embeddings=64,
        ),
        "positions depend on the longest sequence of the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        ModelRunner(make(), "auto", 16)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0


def test_refuses_a_model_whose_numbers_are_wrong() -> None:
    """Every layer calls the hook as it should, but the configuration does not say what the mask would have done."""
    model = AutoModelForCausalLM.from_config(
        tiny_config("llama", layer_types=["chunked_attention"] * 3, attention_chunk_size=4), attn_implementation="eager"
    )
    with pytest.raises(UnsupportedModel, match="its logits are not those of the unmodified model"):
        ModelRunner(model, "reference", 4)


def test_refuses_positions_that_are_not_those_it_is_given() -> None:
    """Right for a sequence computed at once, and for a first chunk; wrong for every later one."""
    model = tiny_model("llama")
    inner = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: inner(x, torch.arange(x.shape[1])[None])
    with pytest.raises(UnsupportedModel, match="its logits are not those of the unmodified model"):
        ModelRunner(model, "reference", 4)


class TwiceLlama(LlamaForCausalLM):
    """Runs its layers twice, as weight-sharing models do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers.extend(list(self.model.layers))
        config.num_hidden_layers *= 2


def test_refuses_layers_that_attend_more_than_once() -> None:
    with pytest.raises(UnsupportedModel, match="a layer attends more than once"):
        ModelRunner(TwiceLlama(tiny_config("llama")), "reference", 4)


def test_refuses_inputs_it_does_not_know() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(
            *args, position_bias=torch.zeros(1), **kwargs
        )
    with pytest.raises(UnsupportedModel, match=r"does not know \(position_bias\)"):
        ModelRunner(model, "reference", 4)


def test_describes_each_layer() -> None:
    specs = [layer.spec for layer in probe(tiny_model("gemma2"))]
    assert [spec.layer_idx for spec in specs] == [0, 1, 2]
    assert [spec.window for spec in specs] == [6, None, 6]
    assert {spec.softcap for spec in specs} == {5.0}
    assert {(spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in specs} == {(4, 2, 16, 16)}
    assert {spec.scale for spec in specs} == {0.25}
    assert {spec.layout.kind for spec in specs} == {AttentionKind.GQA}

    assert all(layer.spec.has_sink for layer in probe(tiny_model("gpt_oss")))
    assert [layer.spec.chunk for layer in probe(tiny_model("llama4_text"))] == [8, 8, 8, None]
    (latent, *_) = probe(tiny_model("deepseek_v3"))
    assert (latent.spec.num_heads, latent.spec.num_kv_heads) == (4, 1)
    assert (latent.spec.key_dim, latent.spec.value_dim, latent.spec.latent_rank) == (32, 32, 24)


def test_a_layer_that_changes_after_the_probe_fails_loudly() -> None:
    runner = ModelRunner(tiny_model("llama"), "reference", 4)
    runner.allocate(3)
    plan = pack([([5, 6, 7], 0, [[1]])], 4)
    runner.compute_logits(plan)
    runner.model.model.layers[1].self_attn.scaling = 0.5
    with pytest.raises(UnexpectedAttention, match="layer 1 changed its attention after the probe"):
        runner.compute_logits(plan)


def test_a_hooked_model_does_not_run_on_its_own() -> None:
    runner = ModelRunner(tiny_model("llama"), "reference", 4)
    with pytest.raises(RuntimeError, match="run it through ModelRunner"):
        runner.model(torch.tensor([[5, 6, 7]]))


ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 16,
            },
            "original_max_position_embeddings": 16,
            "sliding_window": None,
        },
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
            "max_position_embeddings": 16,
        },
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_length_dependent_rope_is_pinned_to_the_longest_sequence(kind: str) -> None:
    """A sequence of that length gets what transformers computes for it, and a neighbour's length changes nothing."""
    architecture, changes = ROPES[kind]
    longest = 30
    ids = torch.randint(3, VOCAB, (longest,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = tiny_model(architecture, **changes)(input_ids=ids[None], use_cache=False).logits[0]
    runner = ModelRunner(tiny_model(architecture, **changes), "cpu", 4, max_model_len=longest)
    assert isinstance(next(iter(runner._layers.values())).backend, CpuBackend)

    def logits(sequences: list[list[int]], sizes: list[int]) -> torch.Tensor:
        runner.allocate(30)
        paged = PagedSequences(sequences, 30, 4, num_groups=len(runner.layout.groups))
        out = []
        while paged.done[0] < len(sequences[0]):
            plan, parts = paged.plan(sizes)
            out.append(runner.compute_logits(plan)[: parts[0][2]])
        return torch.cat(out)

    torch.testing.assert_close(logits([ids.tolist()], [7]), expected, atol=1e-4, rtol=0)
    short = ids[:9].tolist()
    alone = logits([short], [3])
    beside = logits([short, ids.tolist()], [3, 10])
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)

    runner.limit_length(len(short))
    with torch.inference_mode():
        expected = tiny_model(architecture, **changes)(input_ids=ids[None, :9], use_cache=False).logits[0]
    torch.testing.assert_close(logits([short], [3]), expected, atol=1e-4, rtol=0)
