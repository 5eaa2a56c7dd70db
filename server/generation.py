"""What a caller of the engine asks for and gets: requests, outputs, refusals and the engine's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from server.step import Constraint, SamplingParams, TokenLogprobs


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
    constraint: the grammar that the output follows; each sequence has its own.
    shown_special_ids: special tokens that stand in the text although `skip_special_tokens`.
    queue_timeout, timeout: seconds from submission within which it must be admitted and must be finished.
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
    constraint: Constraint | None = None
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
    """Token counts of one sequence so far; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Output:
    """What has become certain since the last output of the same request.

    text: new text to show; joined over all outputs it is the answer, cut at whole characters and at the stop string.
    tokens: the tokens released with it (text that may still become a stop string is held back, with its tokens).
    prompt_logprobs: once, with the first output, when asked for: one entry a prompt token, the first None.
    finish_reason: None until the last output, then "stop", "length" or "abort".
    stop_reason: the stop string or token id that ended it, None for the model's own end and for the other reasons.
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
    """`detail` says in words what is being loaded, or why the engine is dead."""

    phase: Phase
    detail: str = ""
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What callers may know of the loaded model.

    max_model_len: most tokens, prompt and output, that one request may have: the model's, the operator's or the pool's
        limit, whichever is least; `limited_by` names the flag that would raise it.
    eos_token_ids: ids that end a sequence unless ignored.
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


class EngineError(Exception):
    """Base of all that the engine refuses or fails with."""


class EngineUnavailable(EngineError):
    """The engine is loading, draining or dead. `phase` says which, the message the details."""

    def __init__(self, message: str, phase: Phase) -> None:
        super().__init__(message)
        self.phase = phase


class QueueFull(EngineError):
    """As many requests are open as the operator allows. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTooLong(EngineError):
    """The prompt leaves no room for an output, or can never fit the pool."""


class GenerationFailed(EngineError):
    """The engine failed while the request was open; its output is incomplete."""
