"""What a request must generate: its sequence computed token by token, in plain loops, without a scheduler or a pool.

A 64-bit hash stands for the K and V of a token. It depends on what the token's layers see: on the whole text where any
layer sees all of it, otherwise on each token that is in sight or that a budget has kept. What is drawn is a pure
function of that hash, the seed and the output index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from server.kvpool.layout import EVERYTHING, Visibility
from server.step import EvictionPolicy, SamplingParams, TokenLogprobs

VOCAB_SIZE = 61
EMPTY = 0x243F6A8885A308D3  # the hash of no tokens
MASK = (1 << 64) - 1
_ATTENTION = 0xD6E8FEB86659FD93


def extend_history(history: int, token: int) -> int:
    """The hash of a token history continued by `token` (the finaliser of splitmix64)."""
    x = (history ^ ((token + 1) * 0x9E3779B97F4A7C15)) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def blend(views: Iterable[Sequence[int]]) -> int:
    """One hash of the tokens that each group of layers sees, in order."""
    total = 0
    for view in views:
        total = extend_history(total, len(view))
        for index, history in enumerate(view):
            total += history * (2 * index + 1)
        total &= MASK
    return total


def attention(query: int, key: int) -> int:
    """How much a token attends to another: 20 bits."""
    return (((query ^ key) * _ATTENTION) & MASK) >> 44


def draw(history: int, params: SamplingParams, out_index: int) -> int:
    return extend_history(extend_history(history, params.seed), out_index) % VOCAB_SIZE


def score(history: int, target: int) -> float:
    """The log-probability of `target` after `history`: arbitrary, but telling for both."""
    return -(extend_history(history, target) % 100_003) / 5000


@dataclass(frozen=True)
class Keeping:
    """How sequences are cached: what each group of layers sees; tokens that stay of one with a budget, None for all."""

    groups: tuple[Visibility, ...] = (EVERYTHING,)
    keep: int | None = None
    policy: EvictionPolicy = "window"
    block_size: int = 0


@dataclass(slots=True)
class Token:
    history: int
    position: int
    attention: int = 0  # that later ones, and itself, have paid to it


class Alone:
    """A sequence with a cache of its own, a list."""

    def __init__(self, keeping: Keeping = Keeping()) -> None:
        self.keeping = keeping
        self.cache: list[Token] = []
        self.num_tokens = 0
        self.most = 0
        self.sees_all = EVERYTHING in keeping.groups
        if keeping.keep is not None:
            blocks = 4
            while blocks * keeping.block_size * 4 < keeping.keep:
                blocks += 1
            self.most = keeping.keep + blocks * keeping.block_size

    def append(self, token: int) -> int:
        """Compute one more token; returns its hash."""
        if self.most and len(self.cache) == self.most:
            self.give_up()
        if self.sees_all and len(self.cache) == self.num_tokens:
            history = extend_history(self.cache[-1].history if self.cache else EMPTY, token)
        else:
            before = [cached.history for cached in self.cache]
            views = [before[group.first(len(before)) :] for group in self.keeping.groups]
            history = extend_history(extend_history(blend(views), self.num_tokens), token)
        self.cache.append(Token(history, self.num_tokens))
        if self.most:
            for cached in self.cache:
                cached.attention += attention(history, cached.history)
        self.num_tokens += 1
        return history

    def give_up(self) -> None:
        """Keep the first four, though no more than half; the newest half; and of the others what the policy says."""
        keep = self.keeping.keep
        assert keep is not None
        sinks, recent = min(4, keep // 2), keep // 2
        others = self.cache[sinks : len(self.cache) - recent]
        if self.keeping.policy == "window":
            others.sort(key=lambda token: -token.position)
        else:
            others.sort(key=lambda token: (-token.attention, token.position))
        chosen = sorted(others[: keep - sinks - recent], key=lambda token: token.position)
        self.cache = self.cache[:sinks] + chosen + self.cache[len(self.cache) - recent :]


def histories_alone(tokens: Iterable[int], keeping: Keeping = Keeping()) -> list[int]:
    """The hash of each token."""
    sequence = Alone(keeping)
    return [sequence.append(token) for token in tokens]


def outputs_alone(
    prompt: Sequence[int], params: SamplingParams, max_tokens: int, keeping: Keeping = Keeping()
) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request."""
    sequence = Alone(keeping)
    history = EMPTY
    for token in prompt:
        history = sequence.append(token)
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(draw(history, params, len(outputs)))
        if outputs[-1] in params.stop_token_ids:
            return outputs, "stop"
        history = sequence.append(outputs[-1])
    return outputs, "length"


def scores_alone(prompt: Sequence[int], keeping: Keeping = Keeping()) -> list[TokenLogprobs]:
    """The log-probability of every prompt token but the first, given those before it."""
    sequence = Alone(keeping)
    return [TokenLogprobs(following, score(sequence.append(token), following)) for token, following in pairwise(prompt)]
