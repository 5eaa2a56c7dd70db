"""What the engine and the HTTP side report to the metrics, and the words they use for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

AbortCause: TypeAlias = Literal[
    "disconnect", "api", "sibling", "shutdown", "queue_timeout", "deadline", "deadline_empty"
]
DiscardReason: TypeAlias = Literal["preemption", "disconnect", "abort", "error"]
MemoryKind: TypeAlias = Literal["weights", "kv_cache", "activations_peak", "device_free"]
RejectReason: TypeAlias = Literal["invalid", "too_long", "queue_full", "queue_tokens", "loading", "draining", "dead"]
StartupPhase: TypeAlias = Literal["import", "load_weights", "profile", "total"]

ENDPOINTS = ("completions", "chat", "responses", "messages")
STAGES = ("schedule", "copy", "compact", "forward", "sample", "detokenize")
"""Of a step, in order."""
FINISH_REASONS = ("stop", "length", "abort", "error")
WAIT_REASONS = ("slots", "kv_blocks", "token_budget", "shared_prompt")


@dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step, from planning to the last text. All times in seconds.

    prefill_requests, prefill_tokens: sequences still computing their prompt (or recomputing after preemption), and the
        tokens of theirs in this step; decode_requests, decode_tokens: the others.
    duration_seconds: wall time of the whole step.
    copy_seconds: of copies to and from host memory, None where the step had none; compaction_seconds: likewise, of
        giving up what sequences have beyond their budgets.
    """

    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    duration_seconds: float
    schedule_seconds: float
    forward_seconds: float
    sample_seconds: float
    detokenize_seconds: float
    copy_seconds: float | None = None
    compaction_seconds: float | None = None


EVICTION_CAUSES = ("prefix_lru", "sliding_window", "h2o", "window")
"""Why a block is given up: new content needs it, the model's windows have passed it, a budget's policy."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """The blocks of host memory. Totals since the start: saved to it, loaded from it, given up there for others."""

    capacity_blocks: int
    used_blocks: int
    saved_blocks: int
    loaded_blocks: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The scheduler and its pool as they are now. `used + cached + free` blocks are the capacity.

    waiting: requests not in the running batch, by which of WAIT_REASONS they wait for; absent reasons are none.
    waiting_tokens: prompt tokens of those that have not started yet; siblings' common prompt counts once.
    used_blocks: referenced by a running request; cached_blocks: kept for their content only, evictable.
    unused_slots: slots for tokens in used blocks that hold none yet.
    preemptions, queried_tokens, hit_tokens: totals since the start, None where there is nothing new;
        prefix-cache look-ups and hits are counted in prompt tokens.
    evicted_by: blocks given up since the start, by which of EVICTION_CAUSES.
    kept_tokens, dropped_tokens: of sequences with a budget, at each compaction since the start, by policy.
    host: None without host memory.
    """

    running: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    waiting: Mapping[str, int] = field(default_factory=dict)
    waiting_tokens: int = 0
    unused_slots: int = 0
    preemptions: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None
    evicted_by: Mapping[str, int] = field(default_factory=dict)
    kept_tokens: Mapping[str, int] = field(default_factory=dict)
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)
    host: HostReport | None = None


BlockRuns: TypeAlias = tuple[tuple[int, int], ...]
"""Blocks as runs of neighbouring ids: the first and the last of each."""


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A sequence and the blocks it holds; nothing of its text, its tokens' ids or its salt.

    status: "ended" is one that was aborted while the step in progress computes it.
    num_tokens: of prompt and output so far; num_computed, num_evicted: those of them whose keys and values were
        computed, and those that its budget has made it give up since.
    num_shared: blocks among its own that other sequences hold, too.
    blocks: for each table group those it holds, in the order of its tokens; the trash block is not among them.
    """

    request_id: str
    status: Literal["running", "waiting", "ended"]
    num_tokens: int
    num_computed: int
    num_evicted: int
    num_shared: int
    blocks: tuple[BlockRuns, ...]


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """Layers that share a block table, and how far they see: None sets no limit (see `kvpool.layout.Visibility`)."""

    window: int | None
    chunk: int | None


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Who holds which blocks at one moment, as plain data: ids from 1 to `capacity_blocks`, in one state each.

    used_blocks: held by a sequence; cached_blocks: kept for their content only, `cached` names them, ascending; the
        rest is free.
    sequences: those that run, in the order of the batch, those that were aborted in this step, those that wait.
    host: None without host memory.
    """

    capacity_blocks: int
    block_size: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    groups: tuple[GroupSnapshot, ...]
    sequences: tuple[SequenceSnapshot, ...]
    cached: BlockRuns
    host: HostReport | None = None


@dataclass(frozen=True, slots=True)
class FinishedReport:
    """One request that is over. Seconds are None for a phase it never reached; `finish_reason` is of FINISH_REASONS.

    abort_cause: why, if `finish_reason` is "abort", else None; "sibling": another sequence of its body has failed. A
        request that ends at its deadline is one of these, though its client is told "length" where there is an answer;
        "deadline_empty" where there is none.
    queue_seconds: arrival to first admission; prefill_seconds: admission to first token; decode_seconds: first to last
        token; total_seconds: arrival to the end.
    """

    endpoint: str
    finish_reason: str
    abort_cause: AbortCause | None
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    total_seconds: float

    @property
    def ttft_seconds(self) -> float | None:
        """Arrival to the first token; None where there is none."""
        if self.queue_seconds is None or self.prefill_seconds is None:
            return None
        return self.queue_seconds + self.prefill_seconds

    @property
    def mean_gap_seconds(self) -> float | None:
        """From one token to the next on average; None where fewer than two came."""
        if self.decode_seconds is None or self.generation_tokens < 2:
            return None
        return self.decode_seconds / (self.generation_tokens - 1)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The model and its pool, once loaded.

    model: what the weights came from; num_blocks: those that requests can hold, so without the trash block.
    num_groups: block tables of a sequence, one for each group of layers.
    block_bytes: of one block, in all layers; host_blocks: those of host memory, 0 without.
    max_num_seqs, max_queued_requests: how many may run together, and wait beside them.
    """

    model: str
    revision: str | None
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    prefix_caching: bool
    max_num_seqs: int
    max_queued_requests: int
    block_bytes: int
    host_blocks: int
    num_groups: int
