"""The runner copies blocks from and to host memory before anything else that a step does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from loadtest.architectures import tiny_model
from server.model.runner import ModelRunner
from server.model.trial import pack
from server.step import ConstraintFailed, GrammarsFailed, Int32Array, SamplingParams, StepPlan

BLOCK_SIZE = 4
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
OTHER = [40, 41, 42, 43, 44, 45]
SAVED = 8  # tokens of two blocks


class DeadEnd:
    """A grammar that permits nothing."""

    finished = False

    def fill_mask(self, mask: Int32Array) -> None:
        raise ConstraintFailed("nothing may follow")

    def accept(self, token_id: int) -> None:
        raise AssertionError("there was nothing to accept")


@pytest.fixture
def runner() -> ModelRunner:
    runner = ModelRunner(tiny_model("llama"), "cpu", BLOCK_SIZE)
    runner.allocate(10)
    runner.allocate_host(3)
    runner.pool.fill_(float("nan"))
    runner.run(pack([(TEXT[:SAVED], 0, [[3, 4]])], BLOCK_SIZE))
    return runner


def overwriting() -> StepPlan:
    """Another text, in the blocks that are saved in the same step, and further ones."""
    return replace(pack([(OTHER, 0, [[4, 3]])], BLOCK_SIZE), saves=((3, 2), (4, 0)))


def assert_continues(logits: torch.Tensor) -> None:
    with torch.inference_mode():
        expected = tiny_model("llama")(torch.tensor([TEXT])).logits[0, SAVED:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_block_is_saved_before_the_step_writes_over_it(runner: ModelRunner) -> None:
    result = runner.run(overwriting())
    assert result.copy_seconds > 0
    runner.run(replace(pack([([50], 0, [[9]])], BLOCK_SIZE), loads=((2, 7), (0, 5))))
    assert_continues(runner.compute_logits(pack([(TEXT[SAVED:], SAVED, [[7, 5, 8]])], BLOCK_SIZE)))


def test_a_block_is_loaded_after_the_saves_of_its_step_and_before_the_pass(runner: ModelRunner) -> None:
    """Of the two blocks one is loaded over the other, which was saved; the step itself reads both."""
    plan = pack([(TEXT[SAVED:], SAVED, [[7, 3, 8]])], BLOCK_SIZE)
    copied = replace(
        plan,
        saves=((3, 1), (4, 2)),
        loads=((2, 3), (1, 7)),
        logit_indices=plan.logit_indices[-1:],
        sample_rows=np.zeros(1, dtype=np.int32),
        out_indices=np.zeros(1, dtype=np.int64),
        params=(SamplingParams(temperature=0.0),),
        histories=(None,),
    )
    drawn = runner.run(copied).token_ids
    with torch.inference_mode():
        assert drawn == tiny_model("llama")(torch.tensor([TEXT])).logits[0, -1].argmax()
    assert_continues(runner.compute_logits(plan))


def test_a_step_that_fails_has_copied_all_the_same(runner: ModelRunner) -> None:
    plan = overwriting()
    failing = replace(
        plan,
        logit_indices=plan.logit_indices[-1:],
        sample_rows=np.zeros(1, dtype=np.int32),
        out_indices=np.zeros(1, dtype=np.int64),
        params=(SamplingParams(),),
        histories=(None,),
        constraints=(DeadEnd(),),
    )
    with pytest.raises(GrammarsFailed):
        runner.run(failing)
    runner.host.load([(2, 7), (0, 5)])
    assert_continues(runner.compute_logits(pack([(TEXT[SAVED:], SAVED, [[7, 5, 8]])], BLOCK_SIZE)))


def test_a_new_pool_has_no_host_memory_yet(runner: ModelRunner) -> None:
    assert runner.host.nbytes == 3 * runner.layout.bytes_per_block
    runner.allocate(6)
    assert runner.host.nbytes == 0
    runner.allocate_host(2)
    runner.host.save([(5, 1)])
