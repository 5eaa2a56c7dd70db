"""A runner without a model that believes nothing a plan says.

It keeps a shadow of the pool: for each slot the token and position written there and a 64-bit hash of the whole token
history up to it, which stands for the K and V a model would have stored. Before a step it checks that every slot the
step attends to holds exactly the history it should, so a block that was shared, evicted, preempted or published wrongly
is noticed when it is read. The token it draws is a pure function of the token history, the seed and the output index;
what a request generates alone is therefore what it must generate in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from server.kvpool.blocks import TRASH_BLOCK
from server.step import SamplingParams, StepPlan, StepResult, TokenLogprobs

VOCAB_SIZE = 61

_MASK = (1 << 64) - 1
_EMPTY = 0x243F6A8885A308D3  # the hash of no tokens


def extend_history(history: int, token: int) -> int:
    """The hash of a token history continued by `token` (the finaliser of splitmix64)."""
    x = (history ^ ((token + 1) * 0x9E3779B97F4A7C15)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _extend_histories(histories: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    x = histories ^ ((tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(history: int, params: SamplingParams, out_index: int) -> int:
    return extend_history(extend_history(history, params.seed), out_index) % VOCAB_SIZE


def score(history: int, target: int) -> float:
    """The log-probability of `target` after `history`: arbitrary, but telling for both."""
    return -(extend_history(history, target) % 100_003) / 5000


def outputs_alone(prompt: Sequence[int], params: SamplingParams, max_tokens: int) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request, without a scheduler, a pool or a batch."""
    history = _EMPTY
    for token in prompt:
        history = extend_history(history, token)
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(draw(history, params, len(outputs)))
        if outputs[-1] in params.stop_token_ids:
            return outputs, "stop"
        history = extend_history(history, outputs[-1])
    return outputs, "length"


def scores_alone(prompt: Sequence[int]) -> list[TokenLogprobs]:
    """The log-probability of every prompt token but the first, given those before it."""
    history = _EMPTY
    scores: list[TokenLogprobs] = []
    for token, following in pairwise(prompt):
        history = extend_history(history, token)
        scores.append(TokenLogprobs(following, score(history, following)))
    return scores


class FakeRunner:
    """Runs plans over a shadow pool of `num_blocks` blocks and the trash block; a wrong plan is an AssertionError."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        slots = (num_blocks + 1) * block_size
        self._tokens = np.full(slots, -1, dtype=np.int64)
        self._positions = np.full(slots, -1, dtype=np.int64)
        self._histories = np.zeros(slots, dtype=np.uint64)

    def run(self, plan: StepPlan) -> StepResult:
        self._check_shapes(plan)
        counts = np.diff(plan.query_starts)
        rows = np.repeat(np.arange(plan.num_sequences), counts)
        starts = plan.context_lens - counts
        assert (starts >= 0).all(), "a sequence computes more tokens than its context has"
        expected_positions = np.arange(plan.num_tokens) - np.repeat(plan.query_starts[:-1] - starts, counts)
        assert (plan.positions == expected_positions).all(), "the positions of a sequence are not contiguous"

        context_lens = plan.context_lens
        context_rows = np.repeat(np.arange(plan.num_sequences), context_lens)
        context_ends = np.cumsum(context_lens, dtype=np.int64)
        context_positions = np.arange(len(context_rows)) - np.repeat(context_ends - context_lens, context_lens)
        context_blocks = plan.block_tables[0][context_rows, context_positions // self.block_size].astype(np.int64)
        context_slots = context_blocks * self.block_size + context_positions % self.block_size
        assert (context_blocks != TRASH_BLOCK).all(), "a sequence keeps tokens in the trash block"
        is_new = context_positions >= starts[context_rows]
        assert (plan.slots[0] == context_slots[is_new]).all(), "a token is written where its sequence will not look"

        self._check_ownership(plan, rows, context_rows, context_blocks)
        self._check_context(context_slots[~is_new], context_positions[~is_new])
        histories = self._write(plan, counts, starts, context_slots, context_ends)
        return self._result(plan, histories)

    def _check_shapes(self, plan: StepPlan) -> None:
        tokens, sequences, samples = plan.num_tokens, plan.num_sequences, len(plan.sample_rows)
        assert tokens >= sequences >= 1
        assert plan.input_ids.shape == plan.positions.shape == plan.slots[0].shape == (tokens,)
        assert plan.query_starts.shape == (sequences + 1,)
        assert plan.query_starts[0] == 0
        assert plan.query_starts[-1] == tokens
        assert (np.diff(plan.query_starts) >= 1).all(), "a sequence without tokens is in the plan"
        assert (np.diff(plan.query_starts)[: plan.num_decodes] == 1).all(), "the first sequences are not the decodes"
        assert set(range(plan.num_decodes)) <= set(plan.sample_rows.tolist()), "a decode does not sample"
        assert plan.block_tables.shape[1] == sequences
        assert plan.block_tables.shape[2] * self.block_size >= plan.context_lens.max(), "a block table is too short"
        assert (plan.block_tables >= 0).all()
        assert (plan.block_tables <= self.num_blocks).all()
        for name in ("input_ids", "positions", "slots", "logit_indices", "out_indices", "score_targets"):
            assert getattr(plan, name).dtype == np.int64, name
        for name in ("query_starts", "context_lens", "block_tables", "sample_rows", "score_rows"):
            assert getattr(plan, name).dtype == np.int32, name
        assert ((plan.input_ids >= 0) & (plan.input_ids < VOCAB_SIZE)).all(), "a token was never drawn or given"
        assert len(plan.out_indices) == len(plan.params) == len(plan.histories) == samples
        assert len(plan.score_targets) == len(plan.score_tops) == len(plan.score_rows)
        assert len(plan.logit_indices) == samples + len(plan.score_rows)
        assert (np.diff(plan.sample_rows) >= 1).all(), "a sequence is sampled twice in a step"
        assert (plan.logit_indices[:samples] == plan.query_starts[plan.sample_rows + 1] - 1).all()
        if len(plan.score_rows):
            scored = plan.logit_indices[samples:]
            assert (np.diff(plan.score_rows) >= 0).all()
            assert (np.diff(scored) >= 1).all(), "a position is scored twice in a step"
            assert (plan.query_starts[plan.score_rows] <= scored).all()
            assert (scored < plan.query_starts[plan.score_rows + 1]).all()

    def _check_ownership(
        self,
        plan: StepPlan,
        rows: npt.NDArray[np.int64],
        context_rows: npt.NDArray[np.int64],
        context_blocks: npt.NDArray[np.int64],
    ) -> None:
        """A block that is written belongs to one sequence, and nobody else reads it."""
        writer = np.full(self.num_blocks + 1, -1, dtype=np.int64)
        writer[plan.slots[0] // self.block_size] = rows
        assert (writer[plan.slots[0] // self.block_size] == rows).all(), "two sequences write to the same block"
        writers = writer[context_blocks]
        assert ((writers == -1) | (writers == context_rows)).all(), "a block is written while another sequence reads it"
        assert len(np.unique(plan.slots)) == plan.num_tokens, "a slot is written twice"

    def _check_context(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        """Every slot read was written before, at its position, behind exactly the history its sequence has."""
        assert (self._positions[slots] == positions).all(), "a slot is read that holds another position, or nothing"
        previous = np.empty(len(slots), dtype=np.uint64)
        previous[1:] = self._histories[slots[:-1]]
        previous[positions == 0] = _EMPTY
        held = self._histories[slots]
        assert (held == _extend_histories(previous, self._tokens[slots])).all(), "a slot holds another prompt's history"

    def _write(
        self,
        plan: StepPlan,
        counts: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        context_slots: npt.NDArray[np.int64],
        context_ends: npt.NDArray[np.int64],
    ) -> list[int]:
        """Store the step's tokens; returns the history after each packed token."""
        histories: list[int] = []
        tokens = plan.input_ids.tolist()
        before_first = (context_ends - counts - 1).tolist()
        index = 0
        for count, start, before in zip(counts.tolist(), starts.tolist(), before_first, strict=True):
            history = int(self._histories[context_slots[before]]) if start else _EMPTY
            for token in tokens[index : index + count]:
                history = extend_history(history, token)
                histories.append(history)
            index += count
        self._tokens[plan.slots[0]] = plan.input_ids
        self._positions[plan.slots[0]] = plan.positions
        self._histories[plan.slots[0]] = np.array(histories, dtype=np.uint64)
        return histories

    def _result(self, plan: StepPlan, histories: list[int]) -> StepResult:
        samples = len(plan.sample_rows)
        indices = plan.logit_indices.tolist()
        token_ids = [
            draw(histories[index], params, out_index)
            for index, params, out_index in zip(indices[:samples], plan.params, plan.out_indices.tolist(), strict=True)
        ]
        scores = tuple(
            TokenLogprobs(target, score(histories[index], target))
            for index, target in zip(indices[samples:], plan.score_targets.tolist(), strict=True)
        )
        return StepResult(np.array(token_ids, dtype=np.int64), (None,) * samples, scores)
