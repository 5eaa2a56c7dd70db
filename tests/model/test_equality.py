"""Paged, packed, chunked: the logits are those of the unmodified Hugging Face model."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

import server.model.attention.cpu
from loadtest.architectures import ARCHITECTURES, VOCAB, tiny_model
from server.model.runner import ModelRunner
from tests.model.paging import PagedSequences

LENGTHS = (23, 9, 14)
# Tokens of each sequence in each step: prompts in chunks, beside others that decode already.
STEPS = [(10, 6, 5), (6, 1, 4), (4, 1, 1), (1, 1, 1), (1, 0, 1), (1, 0, 1), (0, 0, 1)]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def unmodified(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(request.param)


def worst_error(model: PreTrainedModel, backend: str, block_size: int) -> float:
    """Greatest difference of any logit between the paged and the unmodified model."""
    return runner_error(model, ModelRunner(copy.deepcopy(model), backend, block_size))


def runner_error(model: PreTrainedModel, runner: ModelRunner) -> float:
    """The same for a runner that has a copy of the model."""
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]
    with torch.inference_mode():
        expected = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    groups = len(runner.layout.groups)
    runner.allocate(40 * groups)
    runner.pool.fill_(float("nan"))
    paged = PagedSequences([ids.tolist() for ids in sequences], 40 * groups, runner.block_size, num_groups=groups)
    error = 0.0
    for sizes in STEPS:
        plan, parts = paged.plan(sizes)
        logits = runner.compute_logits(plan).split([size for _, _, size in parts])
        for (index, start, size), actual in zip(parts, logits, strict=True):
            error = max(error, (actual - expected[index][start : start + size]).abs().max().item())
    assert paged.done == list(LENGTHS)
    return error


@pytest.mark.parametrize(("backend", "block_size"), [("reference", 4), ("cpu", 4), ("cpu", 16)])
def test_logits_equal_the_unmodified_model(unmodified: PreTrainedModel, backend: str, block_size: int) -> None:
    assert worst_error(unmodified, backend, block_size) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt_oss", "llama4_text"])
def test_flash_kernel_decodes_alike(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.model.attention.cpu, "DENSE_GROUP", 0)
    assert worst_error(tiny_model(architecture), "cpu", 4) < 1e-4
