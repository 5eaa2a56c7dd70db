"""The embedded SmolLM2-135M: twenty real prompts, batched and paged, against the unmodified model's `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from server.bench.workload import load_prompts
from server.model.runner import ModelRunner
from server.scheduler.request import Request
from server.scheduler.scheduler import Scheduler, SchedulerConfig
from server.step import SamplingParams

NUM_PROMPTS = 20
NUM_TOKENS = 24
NEAR_TIE = 1e-3

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def prompts(embedded_path: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded_path)
    return [tokenizer(prompt)["input_ids"] for prompt in load_prompts()[:NUM_PROMPTS]]


@pytest.fixture(scope="module")
def generated(embedded_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` answers greedily, one prompt at a time, with the model's end-of-text honoured."""
    model = AutoModelForCausalLM.from_pretrained(embedded_path, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, repetition_penalty=1.0
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_tokens_equal_generate(
    embedded_path: Path, prompts: list[list[int]], generated: list[list[int]], backend: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_path, dtype=torch.float32)
    runner = ModelRunner(model, backend, block_size=16, max_model_len=8192)
    config = SchedulerConfig(block_size=16, num_blocks=120, max_num_seqs=12, max_num_batched_tokens=128)
    runner.allocate(config.num_blocks + 1)
    runner.pool.fill_(float("nan"))
    scheduler = Scheduler(config)
    eos = model.generation_config.eos_token_id
    params = SamplingParams(temperature=0.0, stop_token_ids=frozenset(eos if isinstance(eos, list) else [eos]))
    requests = [Request(str(i), prompt, params, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(runner.run(plan), plan)
        scheduler.check_integrity()

    near_ties = 0
    for request, prompt, expected in zip(requests, prompts, generated, strict=True):
        answer = request.output_ids.tolist()
        if answer != expected:
            first = next(i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b)
            assert _gap(embedded_path, prompt + expected[:first]) < NEAR_TIE, (request.request_id, answer, expected)
            near_ties += 1
    assert near_ties <= 1


def _gap(path: Path, tokens: list[int]) -> float:
    """How far apart the two likeliest next tokens are, by the unmodified model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        top = model(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])
