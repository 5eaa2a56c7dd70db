"""What crosses between the scheduler, which plans a step, and the runner, which computes it.

The scheduler fills a `StepPlan` with plain arrays and never sees a tensor; the runner returns a `StepResult` and never
sees a request. Everything here is immutable once made, so a plan may be executed on another thread or another rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingParams:
    """How one request draws its tokens. Values are validated by whoever builds it; the sampler trusts them.

    temperature: 0 is greedy; below 1e-5 is treated as 0.
    top_k: 0 keeps the whole vocabulary.
    seed: any 64-bit integer; the noise of a token depends on (seed, output index, token id) alone.
    logprobs: None for none, 0 for the chosen token's only, n for the n most likely beside it.
    min_tokens: until this many tokens are out, `stop_token_ids` cannot be drawn.
    stop_token_ids: ids that end the request, the model's end-of-sequence ids included unless they are ignored.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


class Constraint(Protocol):
    """What the next token of one sequence may be: a grammar and how far the sequence has come in it.

    Between `fill_mask` and `accept` the state stays as it is, so a step may be planned and run again. It is used by one
    thread at a time.
    """

    def fill_mask(self, mask: Int32Array) -> None:
        """Write the permitted ids into `mask`, int32 [ceil(V / 32)]: bit `i % 32` of word `i // 32` for token id i.

        At least one is permitted. Raises ConstraintFailed where that cannot be.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token that the mask permitted. Raises ConstraintFailed."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but its end may follow."""
        ...


@dataclass(frozen=True, slots=True)
class History:
    """The tokens a penalty looks at: `prompt` and `output` are int64 arrays, in order."""

    prompt: Int64Array
    output: Int64Array


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token under the raw distribution (before temperature, penalties and bias).

    `top` holds the most likely (token id, logprob) pairs, likeliest first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


EvictionPolicy: TypeAlias = Literal["h2o", "window"]
"""What a sequence with a budget keeps of its cache: beside its first and its newest tokens those that had the most
attention (H2O, arXiv:2306.14048), or those two alone (StreamingLLM, arXiv:2309.17453)."""


@dataclass(frozen=True, slots=True, eq=False)
class Compaction:
    """A sequence that gives tokens of its cache up, in every layer and KV head as many, though not the same.

    What stays is moved, in order, to the first `keep` places of its block table; the blocks behind them are free.

    block_table: int32 [n], all blocks it had before. length: tokens in them.
    keep: tokens that stay: the first `sinks`, the last `recent`, and between them those that `policy` chooses.
    """

    block_table: Int32Array
    length: int
    keep: int
    sinks: int
    recent: int
    policy: EvictionPolicy


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: B sequences with T tokens in all, packed without padding, over G groups of layers.

    input_ids, positions: [T]. Positions are those of the text, whatever the cache still holds of it.
    slots: [G, T]. A slot is `block * block_size + offset`; each names where the token's K and V go in a group's layers.
    query_starts: [B + 1], sequence b owns the packed tokens `query_starts[b]:query_starts[b + 1]`, at least one.
    context_lens: [B], tokens of the sequence in the pool once this step's own are written.
    block_tables: [G, B, widest], rows padded with the trash block 0, which also stands for blocks out of sight.
    logit_indices: [S + P], packed tokens whose logits are needed: first one for each of the S samples, then P scored
        prompt positions.
    sample_rows: [S], the sequence (index into B) each sample belongs to.
    out_indices: [S], how many output tokens the sequence has already; selects the noise.
    params, histories: one for each sample; a history is None unless `params.needs_history`.
    constraints: one for each sample, None where any token may be drawn; empty when nobody has one.
    score_targets: [P], the prompt token whose log-probability is wanted at each scored position.
    score_tops: [P], how many of the most likely tokens to report there.
    score_rows: [P], the sequence each scored position belongs to, ascending.
    num_decodes: how many sequences, the first ones, compute only their newest token; the others compute prompt.
    observed: bool [B], sequences whose attention is added to the scores of what they see; None when there are none.

    Before the pass, in this order:
    saves: blocks to copy to host memory, as (block of the pool, block of the host).
    compactions: what sequences give up. Blocks that this frees may be written by all that follows.
    loads: blocks to copy back, as (block of the host, block of the pool).
    """

    step: int
    input_ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_indices: Int64Array
    sample_rows: Int32Array
    out_indices: Int64Array
    params: tuple[SamplingParams, ...]
    histories: tuple[History | None, ...]
    score_targets: Int64Array
    score_tops: Int64Array
    score_rows: Int32Array
    num_decodes: int = 0
    constraints: tuple[Constraint | None, ...] = ()
    observed: npt.NDArray[np.bool_] | None = None
    saves: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, int], ...] = ()
    compactions: tuple[Compaction, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    token_ids: [S], the drawn tokens.
    logprobs: [S], None where the sample asked for none.
    scores: [P], the scored prompt positions in the plan's order.
    forward_seconds, sample_seconds: time spent in the model and in the sampler.
    copy_seconds, compaction_seconds: time spent before the pass on copies from and to host memory, and on compactions.
    """

    token_ids: Int64Array
    logprobs: tuple[TokenLogprobs | None, ...]
    scores: tuple[TokenLogprobs, ...]
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    copy_seconds: float = 0.0
    compaction_seconds: float = 0.0


class ConstraintFailed(Exception):
    """A grammar cannot be followed further; the message says why."""


class SequencesFailed(Exception):
    """Some sequences of a step cannot go on.

    Nothing is drawn for the step: the error names the sequences, so that they can be failed alone. The others lose
    nothing, since sampling is stateless and running their step again draws the same tokens.

    sequences: indices into the plan's sequences. reason: what those who asked for them are told.
    """

    def __init__(self, message: str, sequences: tuple[int, ...], reason: str) -> None:
        super().__init__(message)
        self.sequences = sequences
        self.reason = reason


class GrammarsFailed(SequencesFailed):
    """The grammars of these sequences cannot be followed further."""


class NonFiniteLogits(SequencesFailed, ArithmeticError):
    """The model computed NaN or infinite logits for these sequences."""

    def __init__(self, sequences: tuple[int, ...]) -> None:
        super().__init__(
            f"the model computed NaN or infinite logits for sequence(s) {', '.join(map(str, sequences))} of the step; "
            "weights or activations overflow: try --dtype float32 or bfloat16",
            sequences,
            "the model computed NaN or infinite logits for this request (see the server's log)",
        )
