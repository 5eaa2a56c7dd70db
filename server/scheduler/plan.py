"""Writes the packed arrays of a `StepPlan` from the sequences chosen for a step and how far each may compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from server.scheduler.cache import Chores
from server.scheduler.request import Request
from server.step import History, StepPlan


def build_plan(
    step: int, scheduled: Sequence[tuple[Request, int]], block_size: int, chores: Chores | None = None
) -> StepPlan:
    """Pack `scheduled`, pairs of a request and the number of its tokens to compute now, into one forward pass.

    chores: what is to be done before it.
    """
    counts = np.array([count for _, count in scheduled], dtype=np.int64)
    evicted = np.array([request.num_evicted for request, _ in scheduled], dtype=np.int64)
    starts = np.array([request.num_computed for request, _ in scheduled], dtype=np.int64) - evicted
    query_starts = np.zeros(len(scheduled) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_starts[1:])
    sequence_of_token = np.repeat(np.arange(len(scheduled)), counts)
    index = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, counts)  # in the cache

    num_groups = len(scheduled[0][0].tables)
    width = max([table.end for request, _ in scheduled for table in request.tables])
    block_tables = np.zeros((num_groups, len(scheduled), width), dtype=np.int32)
    for row, (request, _) in enumerate(scheduled):
        for group, table in enumerate(request.tables):
            block_tables[group, row, : table.end] = table.ids[: table.end]
    blocks = block_tables[:, sequence_of_token, index // block_size].astype(np.int64)

    samples = [
        (row, request)
        for row, (request, count) in enumerate(scheduled)
        if request.max_tokens > 0 and request.num_computed + count == request.num_tokens
    ]
    score_indices: list[int] = []
    score_targets: list[int] = []
    score_tops: list[int] = []
    score_rows: list[int] = []
    for row, (request, count) in enumerate(scheduled):
        if request.prompt_logprobs is None:
            continue
        first = max(request.num_computed, request.num_scored)
        last = min(request.num_computed + count, request.num_prompt - 1)
        offset = int(query_starts[row]) - request.num_computed
        for position in range(first, last):
            score_indices.append(offset + position)
            score_targets.append(int(request.token_ids[position + 1]))
            score_tops.append(request.prompt_logprobs)
            score_rows.append(row)

    constraints = tuple(request.constraint for _, request in samples)
    return StepPlan(
        step=step,
        input_ids=np.concatenate([r.token_ids[r.num_computed : r.num_computed + count] for r, count in scheduled]),
        positions=index + np.repeat(evicted, counts),
        slots=blocks * block_size + index % block_size,
        query_starts=query_starts.astype(np.int32),
        context_lens=(starts + counts).astype(np.int32),
        block_tables=block_tables,
        logit_indices=np.array([query_starts[row + 1] - 1 for row, _ in samples] + score_indices, dtype=np.int64),
        sample_rows=np.array([row for row, _ in samples], dtype=np.int32),
        out_indices=np.array([request.num_outputs for _, request in samples], dtype=np.int64),
        params=tuple(request.params for _, request in samples),
        histories=tuple(_history(request) for _, request in samples),
        score_targets=np.array(score_targets, dtype=np.int64),
        score_tops=np.array(score_tops, dtype=np.int64),
        score_rows=np.array(score_rows, dtype=np.int32),
        constraints=constraints if any(constraint is not None for constraint in constraints) else (),
        num_decodes=sum(not request.is_prefilling for request, _ in scheduled),
        observed=_observed(scheduled),
        saves=() if chores is None else tuple(chores.saves),
        loads=() if chores is None else tuple(chores.loads),
        compactions=() if chores is None else tuple(chores.compactions),
    )


def _observed(scheduled: Sequence[tuple[Request, int]]) -> npt.NDArray[np.bool_] | None:
    """Whose attention counts: of those that evict by it, unless a step that failed has counted it already."""
    observed = np.array(
        [
            request.budget is not None
            and request.budget.policy == "h2o"
            and request.num_computed >= request.num_observed
            for request, _ in scheduled
        ]
    )
    return observed if observed.any() else None


def _history(request: Request) -> History | None:
    if not request.params.needs_history:
        return None
    return History(request.token_ids[: request.num_prompt], request.output_ids.copy())
