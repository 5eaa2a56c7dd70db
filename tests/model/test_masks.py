"""Masks: made beside the forward pass, one constraint's failure its own, and only permitted tokens drawn."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.architectures import VOCAB, tiny_model
from server.model.masks import MaskFiller, Masks
from server.model.runner import ModelRunner
from server.model.sampler import Sampler
from server.step import Constraint, ConstraintFailed, Int32Array, SamplingParams, SequencesFailed, StepPlan
from tests.model.paging import PagedSequences

V = 100
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
GREEDY = SamplingParams(temperature=0.0)


class Only:
    """Permits the same ids always."""

    finished = False

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def fill_mask(self, mask: Int32Array) -> None:
        mask[:] = bits_of(self.ids, 32 * len(mask))

    def accept(self, token_id: int) -> None:
        assert token_id in self.ids


class Broken(Only):
    def fill_mask(self, mask: Int32Array) -> None:
        raise ConstraintFailed(f"no way on for {self.ids}")


def bits_of(ids: Collection[int], size: int) -> Int32Array:
    flags = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def plan_of(params: list[SamplingParams], constraints: list[Constraint | None], **fields: Any) -> StepPlan:
    """As many sequences of one token, each sampled."""
    count = len(params)
    sequences = PagedSequences([[5 + i] for i in range(count)], count + 1, 4).plan([1] * count)[0]
    changes: dict[str, Any] = {
        "logit_indices": np.arange(count),
        "sample_rows": np.arange(count, dtype=np.int32),
        "out_indices": np.zeros(count, dtype=np.int64),
        "params": tuple(params),
        "histories": (None,) * count,
        "constraints": tuple(constraints),
    }
    return replace(sequences, **(changes | fields))


def draw(
    logits: torch.Tensor, params: list[SamplingParams], permitted: list[Collection[int] | None], **fields: Any
) -> list[int]:
    constraints = [None if ids is None else Only(*ids) for ids in permitted]
    plan = plan_of(params, constraints, **fields)
    rows = tuple(row for row, ids in enumerate(permitted) if ids is not None)
    bits = [bits_of(ids, logits.shape[1]) for ids in permitted if ids is not None]
    masks = Masks(rows, np.stack(bits)) if rows else None
    token_ids, _ = Sampler(logits.shape[1]).sample(logits, plan, masks)
    return token_ids.tolist()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 9),
    logit_bias=st.sampled_from([{}, {3: -100.0, 4: -100.0}, {7: 100.0}]),
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=6),
    data=st.data(),
    scale=st.sampled_from([1.0, 50.0, 1e4]),
)
def test_only_permitted_tokens_are_drawn(device: str, params: list[SamplingParams], data: Any, scale: float) -> None:
    ids = st.sets(st.integers(0, V - 1), min_size=1, max_size=V)
    permitted = [data.draw(st.none() | ids) for _ in params]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    logits = (scale * torch.randn(len(params), V)).to(device)
    for token_id, allowed in zip(draw(logits, params, permitted), permitted, strict=True):
        assert allowed is None or token_id in allowed


def test_a_constrained_greedy_row_takes_the_best_that_is_permitted() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, V)
    drawn = draw(logits, [GREEDY, GREEDY], [{2, 40, 99}, None])
    assert drawn == [max((2, 40, 99), key=lambda i: logits[0, i].item()), logits[1].argmax().item()]


def test_neighbours_draw_what_they_draw_alone() -> None:
    torch.manual_seed(2)
    logits = torch.randn(8, V)
    params = [SamplingParams(temperature=t, top_p=p, seed=i) for i, (t, p) in enumerate([(1.0, 1.0), (0.7, 0.9)] * 4)]
    free = draw(logits, params, [None] * 8)
    mixed = draw(logits, params, [None if row % 2 else {1, 2} for row in range(8)])
    assert mixed[1::2] == free[1::2]
    assert draw(logits, params, [None if row % 2 else {1, 2} for row in range(8)]) == mixed


def test_a_constrained_draw_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(3, V)
    params = [SamplingParams(temperature=1.0, seed=9)] * 3
    alone = draw(logits[1:2], params[1:2], [set(range(0, V, 3))])
    assert draw(logits, params, [{1}, set(range(0, V, 3)), None])[1] == alone[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_what_the_model_rules_out_is_drawn_where_nothing_else_is_permitted(temperature: float, top_p: float) -> None:
    logits = torch.zeros(1, V)
    logits[0, [5, 6]] = -math.inf
    params = [SamplingParams(temperature=temperature, top_p=top_p)]
    assert draw(logits, params, [{5, 6}])[0] in {5, 6}
    assert draw(logits, params, [{5, 6, 7}]) == [7]


def test_a_bias_against_all_that_is_permitted_changes_nothing() -> None:
    logits = torch.zeros(1, V)
    logits[0, 8] = 1.0
    assert draw(logits, [replace(GREEDY, logit_bias={7: -100.0, 8: -100.0})], [{7, 8}]) == [8]


def test_before_min_tokens_stops_are_drawn_only_where_nothing_else_is_permitted() -> None:
    logits = torch.zeros(2, V)
    logits[:, 9] = 5.0
    params = [replace(GREEDY, min_tokens=3, stop_token_ids=frozenset({9, 10}))] * 2
    assert draw(logits, params, [{9, 10}, {9, 50}]) == [9, 50]
    assert draw(logits, params, [{9, 10}, {9, 50}], out_indices=np.array([3, 3])) == [9, 9]


def test_ids_beyond_the_vocabulary_are_not_drawn_even_if_a_mask_has_room_for_them() -> None:
    logits = torch.zeros(1, 50)
    assert draw(logits, [SamplingParams(temperature=5.0)], [set(range(45, 50))])[0] in range(45, 50)


def test_scores_are_those_of_the_free_distribution() -> None:
    torch.manual_seed(4)
    logits = torch.randn(1, V)
    plan = plan_of([replace(GREEDY, logprobs=2)], [Only(3)])
    token_ids, (scores,) = Sampler(V).sample(logits, plan, Masks((0,), bits_of([3], V)[None]))
    assert token_ids.tolist() == [3]
    assert scores is not None
    expected = logits[0].log_softmax(-1)
    assert scores.logprob == pytest.approx(expected[3].item(), abs=1e-5)
    assert [top for top, _ in scores.top] == expected.topk(2).indices.tolist()


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    runner = ModelRunner(tiny_model("llama"), "cpu", 4)
    runner.allocate(20)
    return runner


def test_a_step_follows_its_constraints(runner: ModelRunner) -> None:
    params = [GREEDY, SamplingParams(temperature=1.0), GREEDY]
    free = runner.run(plan_of(params, [])).token_ids
    drawn = runner.run(plan_of(params, [None, Only(3, 4), Only(VOCAB - 1)])).token_ids
    assert drawn[0] == free[0]
    assert drawn[1] in (3, 4)
    assert drawn[2] == VOCAB - 1


def test_masks_are_made_on_other_threads_while_the_model_computes(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, computing, threads = threading.Event(), threading.Event(), set()

    class Watched(Only):
        def fill_mask(self, mask: Int32Array) -> None:
            threads.add(threading.current_thread().name)
            begun.set()
            assert computing.wait(10), "the mask was to be made before the forward pass"
            super().fill_mask(mask)

    compute = runner.compute_logits

    def watched(plan: StepPlan) -> torch.Tensor:
        assert begun.wait(10), "the masks were not begun before the forward pass"
        computing.set()
        return compute(plan)

    monkeypatch.setattr(runner, "compute_logits", watched)
    assert runner.run(plan_of([GREEDY], [Watched(11)])).token_ids.tolist() == [11]
    assert threads
    assert all(name.startswith("sluice-masks") for name in threads)


def test_a_constraint_that_fails_names_its_sequence(runner: ModelRunner) -> None:
    plan = plan_of([GREEDY] * 4, [Only(1), Broken(2), None, Broken(3)])
    with pytest.raises(SequencesFailed) as failure:
        runner.run(plan)
    assert (failure.value.sequences, failure.value.reason) == ((1,), "no way on for (2,)")
    plan = plan_of([GREEDY] * 4, [Broken(2), Only(1), None, Broken(2)])
    with pytest.raises(SequencesFailed) as failure:
        runner.run(plan)
    assert failure.value.sequences == (0, 3)


def test_no_thread_uses_a_constraint_after_its_step_has_failed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    class Slow(Only):
        def fill_mask(self, mask: Int32Array) -> None:
            threading.Event().wait(0.2)
            used.append(self)
            super().fill_mask(mask)

    def fail(plan: StepPlan) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner, "compute_logits", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.run(plan_of([GREEDY] * 2, [Slow(1), Slow(2)]))
    assert len(used) == 2


def test_a_step_without_constraints_makes_no_masks() -> None:
    filler = MaskFiller(V)
    assert filler.begin(plan_of([GREEDY], [])) is None
    assert filler.begin(plan_of([GREEDY], [None])) is None
