"""The arrays of a plan, written out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from server.kvpool.table import BlockTable
from server.scheduler.plan import build_plan
from server.scheduler.request import Request
from server.step import SamplingParams
from tests.scheduler.driver import GREEDY

SIZE = 4


def sequence(
    prompt: Sequence[int],
    blocks: Sequence[int],
    *,
    computed: int = 0,
    outputs: Sequence[int] = (),
    max_tokens: int = 8,
    params: SamplingParams = GREEDY,
    prompt_logprobs: int | None = None,
    scored: int = 0,
) -> Request:
    request = Request("r", prompt, params, max_tokens, prompt_logprobs=prompt_logprobs)
    request.tables = [BlockTable()]
    request.tables[0].append(blocks)
    for token in outputs:
        request.append_token(token)
    request.num_computed = computed
    request.num_scored = scored
    return request


def test_a_decode_and_two_chunks_in_one_pass() -> None:
    decode = sequence([1, 2, 3], [9, 4], computed=4, outputs=[5, 6])
    last_chunk = sequence(range(20, 26), [7, 2], computed=3)
    first_chunk = sequence(range(30, 39), [3, 5, 6])

    plan = build_plan(17, [(decode, 1), (last_chunk, 3), (first_chunk, 2)], SIZE)

    assert plan.step == 17
    assert plan.input_ids.tolist() == [6, 23, 24, 25, 30, 31]
    assert plan.positions.tolist() == [4, 3, 4, 5, 0, 1]
    assert plan.slots[0].tolist() == [4 * 4, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 3 * 4, 3 * 4 + 1]
    assert plan.query_starts.tolist() == [0, 1, 4, 6]
    assert plan.context_lens.tolist() == [5, 6, 2]
    assert plan.block_tables[0].tolist() == [[9, 4, 0], [7, 2, 0], [3, 5, 6]]
    assert plan.sample_rows.tolist() == [0, 1], "the first chunk does not reach the end of its prompt"
    assert plan.logit_indices.tolist() == [0, 3]
    assert plan.out_indices.tolist() == [2, 0]
    assert plan.num_decodes == 1
    assert (plan.num_tokens, plan.num_sequences) == (6, 3)


def test_each_sample_has_its_own_parameters() -> None:
    greedy = sequence([1], [1])
    seeded = sequence([2], [2], params=SamplingParams(seed=7))
    plan = build_plan(1, [(greedy, 1), (seeded, 1)], SIZE)
    assert plan.params == (greedy.params, seeded.params)
    assert plan.histories == (None, None)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=-0.5),
        SamplingParams(repetition_penalty=1.2),
    ],
)
def test_a_penalty_is_given_the_history_as_it_was(params: SamplingParams) -> None:
    request = sequence([1, 2, 3], [1, 2], computed=4, outputs=[8, 9], params=params)
    plan = build_plan(1, [(request, 1)], SIZE)
    request.append_token(10)
    (history,) = plan.histories
    assert history is not None
    assert history.prompt.tolist() == [1, 2, 3]
    assert history.output.tolist() == [8, 9]


def test_prompt_only_requests_are_not_sampled() -> None:
    plan = build_plan(1, [(sequence([1, 2], [1], max_tokens=0), 2)], SIZE)
    assert len(plan.sample_rows) == len(plan.logit_indices) == len(plan.params) == 0


def test_positions_are_scored_with_the_token_that_follows() -> None:
    plain = sequence([40, 41], [8])
    scored = sequence(range(20, 26), [7, 2], prompt_logprobs=3)
    plan = build_plan(1, [(plain, 2), (scored, 6)], SIZE)
    assert plan.sample_rows.tolist() == [0, 1]
    assert plan.logit_indices.tolist() == [1, 7, 2, 3, 4, 5, 6], "samples first, then the scored positions"
    assert plan.score_targets.tolist() == [21, 22, 23, 24, 25]
    assert plan.score_rows.tolist() == [1] * 5
    assert plan.score_tops.tolist() == [3] * 5


def test_a_chunk_scores_only_what_has_not_been_scored() -> None:
    again = sequence(range(20, 28), [7, 2], prompt_logprobs=0, scored=3)  # preempted after three
    plan = build_plan(1, [(again, 6)], SIZE)
    assert plan.logit_indices.tolist() == [3, 4, 5]
    assert plan.score_targets.tolist() == [24, 25, 26]
    assert len(plan.sample_rows) == 0


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    plan = build_plan(1, [(sequence([5], [1], prompt_logprobs=2), 1)], SIZE)
    assert len(plan.score_targets) == 0
    assert plan.sample_rows.tolist() == [0]


def test_outputs_computed_again_are_not_scored() -> None:
    request = sequence([1, 2, 3], [1, 2], outputs=[4, 5, 6], prompt_logprobs=0, scored=2)
    plan = build_plan(1, [(request, 6)], SIZE)
    assert len(plan.score_targets) == 0
    assert plan.out_indices.tolist() == [3]


def test_slots_of_a_large_pool_do_not_overflow() -> None:
    block = 2**31 // SIZE + 5
    plan = build_plan(1, [(sequence([1], [block]), 1)], SIZE)
    assert plan.slots.dtype == np.int64
    assert plan.slots[0].tolist() == [block * SIZE]
