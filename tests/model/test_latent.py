"""Multi-head latent attention from the latent: the numbers of the unmodified module, in the memory of the formula."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loadtest.architectures import tiny_model
from server.kvpool.layout import CACHE_DTYPES, AttentionKind, LayerLayout
from server.kvpool.shapes import read_shape
from server.model.hook import _current
from server.model.probe import probe
from server.model.runner import ModelRunner
from server.model.spec import cache_layout
from server.model.trial import pack
from server.scheduler.request import Request
from server.scheduler.scheduler import Scheduler, SchedulerConfig
from server.step import SamplingParams
from tests.model.test_equality import runner_error

LATENT = LayerLayout(AttentionKind.MLA, 1, 24 + 8, 0, rope_dim=8)
EXPANDED = LayerLayout(AttentionKind.MHA, 4, 12 + 8, 10)
DEEPSEEK_V3 = json.loads((Path(__file__).parents[2] / "docs" / "configs" / "deepseek-v3.json").read_text())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("heads", [4, 16], ids=["few heads", "many heads"])
@pytest.mark.parametrize("q_lora_rank", [20, None])
@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_equals_the_unmodified_expanded_module(
    architecture: str, q_lora_rank: int | None, heads: int, backend: str
) -> None:
    """In chunks beside other sequences, over shuffled blocks of a pool full of NaN."""
    model = tiny_model(architecture, num_attention_heads=heads, num_key_value_heads=heads, q_lora_rank=q_lora_rank)
    runner = ModelRunner(copy.deepcopy(model), backend, 4)
    assert runner.layout.layers == (LATENT,) * 3
    assert set(runner.backends) == {backend}
    assert runner_error(model, runner) < 1e-5


def test_latents_may_be_scaled_after_their_norm() -> None:
    """LongCat-Flash does, and scales its queries."""
    sizes = {
        "num_layers": 1,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
    }
    experts = {"zero_expert_num": 1, "moe_topk": 2, "n_routed_experts": 4}
    widths = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
    model = tiny_model("longcat_flash", num_key_value_heads=4, **sizes, **experts, **widths)
    assert all(layer.self_attn[0].mla_scale_kv_lora != 1 for layer in model.model.layers)
    runner = ModelRunner(copy.deepcopy(model), "cpu", 4)
    assert set(runner.layout.layers) == {LATENT}
    assert runner_error(model, runner) < 1e-5


def test_bytes_of_the_pool_are_those_of_the_formula() -> None:
    """[latent | rotary part] once, not twice: the memory that is really taken."""
    runner = ModelRunner(tiny_model("deepseek_v3"), "cpu", 4)
    assert runner.layout.bytes_per_token == 3 * (24 + 8) * 4
    runner.allocate(10)
    assert runner.pool.nbytes == 10 * 4 * 3 * (24 + 8) * 4


def test_a_token_of_deepseek_v3_takes_70272_bytes() -> None:
    """By its config.json and by its loaded layers, 61 of the attention's true widths but of few heads and weights."""
    bfloat16 = CACHE_DTYPES["bfloat16"]
    assert read_shape(DEEPSEEK_V3).layout(bfloat16, 16).bytes_per_token == 70_272
    widths = ("num_hidden_layers", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    model = tiny_model(
        "deepseek_v3",
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=16,
        **{name: DEEPSEEK_V3[name] for name in widths},
    )
    layout = cache_layout([layer.spec for layer in probe(model)], bfloat16, 16)
    assert layout.bytes_per_token == 70_272
    assert layout == read_shape(DEEPSEEK_V3).layout(bfloat16, 16)


def test_the_matrices_are_the_models_own() -> None:
    for layer in probe(tiny_model("deepseek_v2")):
        assert layer.latent is not None
        weight = layer.module.kv_b_proj.weight
        for matrix in (layer.latent.to_key, layer.latent.to_value):
            assert matrix.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_latents_are_let_go() -> None:
    """After the layer's attention; at the end of a pass that failed before it; and none are kept of other passes."""
    runner = ModelRunner(tiny_model("deepseek_v3"), "cpu", 4)
    runner.allocate(3)
    kept = []
    for layer in runner.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: kept.append(_current.latent))
    plan = pack([([5, 6, 7], 0, [[1]])], 4)
    runner.compute_logits(plan)
    assert kept == [None] * 3
    runner._unpaged_logits(torch.tensor([5, 6, 7]))
    assert kept == [None] * 6
    runner.model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.compute_logits(plan)
    assert _current.latent is None


class Quantised(nn.Module):
    """Rows of int8 with a scale each: no plain matrix to view."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).T


class Otherwise(nn.Linear):
    """Has a plain matrix and does something else with it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.square().sum(-1, keepdim=True)


def replaced(make: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    """A model whose layers expand their latents by other modules."""
    model = tiny_model("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = make(layer.self_attn.kv_b_proj)
    return model


def with_bias(linear: nn.Linear) -> nn.Module:
    biased = nn.Linear(linear.in_features, linear.out_features)
    biased.weight = linear.weight
    return biased


def otherwise(linear: nn.Linear) -> nn.Module:
    other = Otherwise(linear.in_features, linear.out_features, bias=False)
    other.weight = linear.weight
    return other


def test_a_quantised_matrix_is_dequantised_once() -> None:
    model = replaced(Quantised)
    runner = ModelRunner(copy.deepcopy(model), "cpu", 4)
    assert runner.layout.layers == (LATENT,) * 3
    assert runner_error(model, runner) < 1e-5


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_bias, "its expansion of the latent has a bias"),
        (otherwise, "its keys and values are not the latent times the matrix"),
    ],
)
def test_what_does_not_fit_is_served_expanded(
    make: Callable[[nn.Linear], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = replaced(make)
    runner = ModelRunner(copy.deepcopy(model), "cpu", 4)
    assert runner.layout.layers == (EXPANDED,) * 3
    assert [record.message for record in caplog.records if record.name == "server.model.probe"] == [
        f"DeepseekV3ForCausalLM has latent attention that is cached expanded, in many times the memory: {reason}"
    ]
    assert runner_error(model, runner) < 1e-5


def test_heads_with_rotary_keys_of_their_own_are_served_expanded(caplog: pytest.LogCaptureFixture) -> None:
    def turn(model: PreTrainedModel) -> PreTrainedModel:
        for layer in model.model.layers:
            attention = layer.self_attn
            expand = type(attention).expand_kv

            def expand_kv(*inputs: Tensor, attention: Any = attention, expand: Any = expand) -> tuple[Tensor, Tensor]:
                key, value = expand(attention, *inputs)
                key[:, 1, :, 12:] *= 1.5
                return key, value

            attention.expand_kv = expand_kv
        return model

    runner = ModelRunner(turn(tiny_model("deepseek_v2")), "cpu", 4)
    assert runner.layout.layers == (EXPANDED,) * 3
    assert "its heads do not share one rotary key" in caplog.text
    assert runner_error(turn(tiny_model("deepseek_v2")), runner) < 1e-5


SHARED = tuple(range(10, 30))
PROMPTS = [(*SHARED, 40, 41, 42), (*SHARED[:16], 50), (*SHARED, 43, 44, 45), (60, 61, 62, 63, 64)]
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=[4, 16], ids=["few heads", "many heads"])
def served(request: pytest.FixtureRequest) -> tuple[ModelRunner, list[list[int]]]:
    """A runner, and what the unmodified model generates for each of PROMPTS."""
    # No experts: they turn rounding into other tokens.
    sizes = {"num_attention_heads": request.param, "num_key_value_heads": request.param, "first_k_dense_replace": 3}
    model = tiny_model("deepseek_v3", **sizes)
    exactly = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([prompt]), **exactly)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    return ModelRunner(copy.deepcopy(model), "cpu", 4), expected


@pytest.mark.parametrize(("chunk", "num_blocks"), [(4, 40), (4, 12), (60, 40), (60, 12)])
def test_chunks_prefixes_and_preemption_change_no_token(
    served: tuple[ModelRunner, list[list[int]]], chunk: int, num_blocks: int
) -> None:
    runner, expected = served
    runner.allocate(num_blocks + 1)
    runner.pool.fill_(float("nan"))
    scheduler = Scheduler(SchedulerConfig(4, num_blocks, max_num_seqs=4, max_num_batched_tokens=4 + chunk))
    greedy = SamplingParams(temperature=0.0)
    requests = [Request(str(index), prompt, greedy, NEW_TOKENS) for index, prompt in enumerate(PROMPTS)]
    for step in range(400):
        if step % 8 == 0 and step // 8 < len(requests):
            scheduler.add(requests[step // 8])
        if step == 9:
            scheduler.preempt(requests[0])
        if (plan := scheduler.plan()) is not None:
            scheduler.commit(runner.run(plan), plan)
    assert [request.output_ids.tolist() for request in requests] == expected
    assert requests[2].num_cached == 20
    assert requests[0].num_preemptions >= 1
