"""What a caller of the engine asks for and gets: requests, outputs, refusals and the engine's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from server.step import Constraint, EvictionPolicy, SamplingParams, TokenLogprobs


class Ending(Protocol):
    """Reads a text as it grows and knows when it is complete."""

    def feed(self, text: str) -> bool:
        """More of the text; whether it is complete with it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One sequence to continue.

    prompt_ids: at least one token id, each within the vocabulary.
    max_tokens: cap on the output, at least 0; 0 only computes (and, with `prompt_logprobs`, scores) the prompt.
    stop: strings that end the text where they first appear in the output; the text excludes them unless
        `include_stop_str`.
    prompt_logprobs: None, or how many of the most likely tokens to report at each prompt position.
    leader: request id of a sibling with the same prompt (`n` > 1) whose prompt, once computed, this one shares.
    priority: lower runs earlier; equal ones run in order of arrival.
    cache_salt: prefixes are shared only between requests of the same salt.
    read_cache: whether blocks that other requests computed may be used; without, siblings compute the prompt each.
    kv_budget: most tokens of it that stay in the cache, None for all; kv_policy says which.
    constraint: the grammar that the output follows; each sequence has its own.
    ending: tells where else the text is complete, once it has `min_tokens`; each sequence has its own.
    shown_special_ids: special tokens that stand in the text although `skip_special_tokens`.
    queue_timeout: seconds from submission within which it, or another sequence submitted with it, must have started;
        else it fails with QueueTimeout. The server's own limit counts where that is less, here and for `timeout`.
    timeout: seconds from submission after which it ends with what it has, `finish_reason` "length" and `stop_reason`
        "deadline"; it fails with DeadlineExceeded if neither it nor a sequence submitted with it has anything.
    tenant: whose share of the batch it counts towards, where sharing is fair.
    endpoint, streaming: labels of the metrics, nothing else.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    leader: str | None = None
    priority: int = 0
    cache_salt: str = ""
    read_cache: bool = True
    kv_budget: int | None = None
    kv_policy: EvictionPolicy = "h2o"
    constraint: Constraint | None = None
    ending: Ending | None = None
    shown_special_ids: frozenset[int] = frozenset()
    queue_timeout: float | None = None
    timeout: float | None = None
    tenant: str = ""
    endpoint: str = "completions"
    streaming: bool = False


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the output. `text` is its share of the text: joined, the pieces are the text before any stop cut.

    A token that ends inside a character has an empty piece; the token that completes it carries the character.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence so far.

    cached_tokens: those of the prompt that came from the prefix cache.
    evicted_tokens: those, of prompt and output, that its `kv_budget` has made the cache give up; 0 is an exact answer.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    evicted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """What has become certain since the last output of the same request.

    text: new text to show; joined over all outputs it is the answer, cut at whole characters and at the stop string.
    tokens: the tokens released with it (text that may still become a stop string is held back, with its tokens).
    prompt_logprobs: once, with the first output, when asked for: one entry a prompt token, the first None.
    finish_reason: None until the last output, then "stop", "length" or "abort".
    stop_reason: the stop string or token id that ended it, "deadline" where its time did (with "length"), else None.
    """

    text: str
    tokens: tuple[OutputToken, ...]
    usage: Usage
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Phase(str, Enum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine is.

    detail: says in words what is being loaded, or why the engine is dead.
    running, waiting: sequences in the batch and in the queue.
    waiting_tokens: prompt tokens of those in the queue that have not started yet.
    kv_usage: share (0 to 1) of the cache that running sequences hold.
    max_num_seqs, max_queued_requests, max_queued_tokens: the limits of batch and queue; 0 while it loads.
    stalled_seconds: how long the step in progress has taken, once that is longer than --stall-timeout; else 0.
    """

    phase: Phase
    detail: str = ""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    max_num_seqs: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    stalled_seconds: float = 0.0


OPENAI_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What callers may know of the loaded model.

    max_model_len: most tokens, prompt and output, that one request may have: the model's, the operator's or the pool's
        limit, whichever is least; `limited_by` names the flag that would raise it.
    eos_token_ids: ids that end a sequence unless ignored.
    default_sampling: what the model's generation config says of sampling.
    """

    served_names: tuple[str, ...]
    root: str
    revision: str | None
    dtype: str
    vocab_size: int
    max_model_len: int
    limited_by: str
    eos_token_ids: frozenset[int]
    created: int
    default_sampling: dict[str, float] = field(default_factory=dict)

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """What holds where a request says nothing: the model's generation config, else OpenAI's defaults."""
        return {name: self.default_sampling.get(name, value) for name, value in OPENAI_SAMPLING.items()}


class EngineError(Exception):
    """Base of all that the engine refuses or fails with."""


class EngineUnavailable(EngineError):
    """The engine is loading, draining or dead. `phase` says which, the message the details."""

    def __init__(self, message: str, phase: Phase) -> None:
        super().__init__(message)
        self.phase = phase


class QueueFull(EngineError):
    """As many requests are open, or as many of their tokens wait, as the operator allows.

    retry_after: seconds; reason: which of the two it is.
    """

    def __init__(self, message: str, retry_after: int, reason: Literal["queue_full", "queue_tokens"]) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class BodyTooLarge(EngineError):
    """The prompts submitted together are more tokens than may ever wait."""


class RequestTooLong(EngineError):
    """The prompt leaves no room for an output, or can never fit the pool."""


class QueueTimeout(EngineError):
    """The request did not start in time; no work was done for it. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(EngineError):
    """The request's time was up before there was anything to answer."""


class GenerationFailed(EngineError):
    """The engine failed while the request was open; its output is incomplete."""


class GrammarFailed(GenerationFailed):
    """The grammar that came with the request cannot be followed further; its output is incomplete."""
