"""Tokens: of prompts, of answers, and those computed in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from server.metrics.families import Families
from server.metrics.instruments import WindowRate
from server.reports import DiscardReason

RATE_WINDOW_SECONDS = 5.0


class TokenMetrics:
    """Called on the engine's thread. `clock` is monotonic, in seconds."""

    def __init__(self, families: Families, clock: Callable[[], float]) -> None:
        model = families.model
        self._prompt_tokens = families.counter(
            "prompt_tokens_total", "Prompt tokens of requests whose prompt is computed, cached ones included."
        ).labels(model)
        self._cached_tokens = families.counter(
            "prompt_tokens_cached_total", "Those of prompt_tokens_total that the prefix cache spared."
        ).labels(model)
        self._generation_tokens = families.counter("generation_tokens_total", "Output tokens delivered.").labels(model)
        discarded = families.counter(
            "discarded_tokens_total", "Tokens computed in vain: computed again later, or never delivered.", "reason"
        )
        self._discarded = {reason: discarded.labels(model, reason) for reason in get_args(DiscardReason)}
        self._prompt_rate = WindowRate(RATE_WINDOW_SECONDS, clock=clock)
        self._generation_rate = WindowRate(RATE_WINDOW_SECONDS, clock=clock)
        for name, rate in (("prompt_tokens", self._prompt_rate), ("generation_tokens", self._generation_rate)):
            window = f"Rate of {name}_total over the last {RATE_WINDOW_SECONDS:g} seconds; 0 when idle."
            families.gauge(f"{name}_per_second", window).labels(model).set_function(rate.rate)

    def prompt_computed(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's prompt of `prompt_tokens` is in the cache, `cached_tokens` of them without being computed.

        To be called once a request: recomputation after preemption does not count again.
        """
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._prompt_rate.add(prompt_tokens)

    def generated(self, count: int) -> None:
        """`count` output tokens were delivered, of any requests."""
        self._generation_tokens.inc(count)
        self._generation_rate.add(count)

    def discarded(self, reason: DiscardReason, tokens: int) -> None:
        """`tokens` computed tokens were thrown away."""
        self._discarded[reason].inc(tokens)
