from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteForCausalLM, LlamaForCausalLM

from loadtest.architectures import VOCAB, tiny_config, tiny_model
from server.model.runner import ModelRunner
from server.model.spec import UnsupportedModel
from server.model.trial import pack, worst_step
from server.step import SamplingParams, StepPlan
from tests.model.paging import PagedSequences

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30]]


def sampling(plan: StepPlan, rows: list[int], params: SamplingParams) -> StepPlan:
    """The plan, sampling after the last token of these sequences and scoring nothing."""
    last = (plan.query_starts[1:] - 1)[rows]
    return replace(
        plan,
        logit_indices=last.astype(np.int64),
        sample_rows=np.array(rows, dtype=np.int32),
        out_indices=np.zeros(len(rows), dtype=np.int64),
        params=(params,) * len(rows),
        histories=(None,) * len(rows),
    )


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(tiny_model("llama"), "cpu", 4)


@pytest.fixture
def plan(runner: ModelRunner) -> StepPlan:
    runner.allocate(20)
    runner.pool.fill_(float("nan"))
    return PagedSequences(PROMPTS, 20, 4).plan([10, 10, 10])[0]


def test_samples_follow_the_logits_of_their_sequences(runner: ModelRunner, plan: StepPlan) -> None:
    result = runner.run(sampling(plan, [2, 0], SamplingParams(temperature=0.0, logprobs=2)))
    reference = tiny_model("llama")
    with torch.inference_mode():
        for row, token, logprobs in zip([2, 0], result.token_ids, result.logprobs, strict=True):
            expected = reference(torch.tensor([PROMPTS[row]])).logits[0, -1].log_softmax(-1)
            assert token == expected.argmax()
            assert logprobs is not None
            assert logprobs.logprob == pytest.approx(expected.max().item(), abs=1e-4)
            assert [top for top, _ in logprobs.top] == expected.topk(2).indices.tolist()
    assert result.forward_seconds > 0
    assert result.sample_seconds > 0


def test_scores_are_the_prompts_logprobs(runner: ModelRunner, plan: StepPlan) -> None:
    scored = replace(
        plan,
        logit_indices=np.arange(6),
        score_targets=np.array(PROMPTS[0][1:]),
        score_tops=np.zeros(6, dtype=np.int64),
        score_rows=np.zeros(6, dtype=np.int32),
    )
    scores = runner.run(scored).scores
    with torch.inference_mode():
        logprobs = tiny_model("llama")(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(-1)
    expected = [logprobs[index, token].item() for index, token in enumerate(PROMPTS[0][1:])]
    assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-4)


def test_a_step_may_want_no_logits(runner: ModelRunner, plan: StepPlan) -> None:
    result = runner.run(sampling(plan, [], SamplingParams()))
    assert len(result.token_ids) == 0
    assert result.logprobs == ()
    assert runner.pool.keys(0)[1:].isfinite().any(), "the step's keys were not written"


def test_writes_only_the_slots_of_the_plan(runner: ModelRunner, plan: StepPlan) -> None:
    runner.compute_logits(plan)
    for layer in range(3):
        written = runner.pool.flat_keys(layer).isfinite().all(-1).all(0).nonzero().flatten()
        assert written.tolist() == sorted(plan.slots[0].tolist())


def test_ids_beyond_the_vocabulary_are_never_drawn() -> None:
    runner = ModelRunner(tiny_model("llama"), "reference", 4, vocab_size=10)
    plan = sampling(pack([([30], 0, [[1]])], 4), [0], SamplingParams(temperature=5.0, logprobs=0))
    runner.allocate(2)
    drawn = {
        int(runner.run(replace(plan, params=(SamplingParams(temperature=5.0, seed=seed),))).token_ids[0])
        for seed in range(100)
    }
    assert drawn <= set(range(10))
    assert len(drawn) > 5


def test_layout_and_pool_agree_with_the_formula(runner: ModelRunner) -> None:
    runner.allocate(7)
    assert runner.layout.bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert runner.pool.nbytes == 7 * runner.layout.bytes_per_block == 7 * 4 * 768


def test_runs_on_any_one_thread(runner: ModelRunner, plan: StepPlan) -> None:
    here = runner.compute_logits(plan)
    there: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: there.append(runner.compute_logits(plan)))
    thread.start()
    thread.join()
    assert torch.equal(here, there[0])


class NoLogitsToKeep(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


class NoLogitsToKeepGranite(GraniteForCausalLM):
    def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: Any = None) -> Any:
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def test_models_without_logits_to_keep_use_their_head(runner: ModelRunner, plan: StepPlan) -> None:
    plain = tiny_model("llama")
    model = NoLogitsToKeep(tiny_config("llama")).eval()
    model.load_state_dict(plain.state_dict())
    other = ModelRunner(model, "cpu", 4)
    other.allocate(20)
    torch.testing.assert_close(other.compute_logits(plan), runner.compute_logits(plan), atol=1e-6, rtol=0)


def test_a_head_that_would_lose_its_scale_is_refused() -> None:
    plain = tiny_model("granite")
    model = NoLogitsToKeepGranite(tiny_config("granite")).eval()
    model.load_state_dict(plain.state_dict())
    with pytest.raises(UnsupportedModel, match="its logits are not those"):
        ModelRunner(model, "cpu", 4)


@pytest.mark.parametrize(
    ("max_tokens", "max_seqs", "logit_rows", "max_model_len"),
    [(64, 8, 8, 200), (300, 4, 40, 100), (9, 8, 3, 16), (20, 1, 16, 16)],
)
def test_worst_step_fills_its_limits_and_runs(
    max_tokens: int, max_seqs: int, logit_rows: int, max_model_len: int
) -> None:
    runner = ModelRunner(tiny_model("llama"), "reference", 4)
    plan = worst_step(max_tokens, max_seqs, logit_rows, max_model_len, 4, 1)
    assert plan.num_tokens == min(max_tokens, max_seqs * max_model_len)
    assert plan.num_sequences == max_seqs
    assert len(plan.logit_indices) == logit_rows
    assert plan.context_lens.max() <= max_model_len
    assert (np.diff(plan.query_starts) <= plan.context_lens).all()
    assert plan.slots.max() < 4, "only the trash block exists yet"
    result = runner.run(plan)
    assert len(result.token_ids) == min(max_seqs, logit_rows)
    assert len(result.scores) == logit_rows - len(result.token_ids)


def test_the_estimate_of_a_step_covers_its_logits_and_grows_with_its_tokens(runner: ModelRunner) -> None:
    base = runner.measure_worst_step(64, 8, 8)
    assert base > 8 * VOCAB * 4 + 64 * 96 * 4
    assert runner.measure_worst_step(128, 8, 8) > base
    assert runner.measure_worst_step(64, 8, 16) >= base + 8 * VOCAB * 4
