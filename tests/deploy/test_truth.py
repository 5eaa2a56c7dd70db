"""What the clients of the panels' load reckon of the budgets, held against plain counting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.panels.traffic import LONG, QUICK, Outcome, Scale
from loadtest.panels.truth import Truth, total
from server.bench.record import Record
from server.step import EvictionPolicy


def ended(prompt: int, output: int, policy: EvictionPolicy | None) -> Outcome:
    record = Record(0.0, prompt_tokens=prompt, completion_tokens=output, cached_tokens=0)
    return Outcome("completions", True, record, "length", policy=policy)


def cuts(tokens: int, scale: Scale) -> int:
    """Tokens enter the cache one by one; the last one drawn never does."""
    held = count = 0
    for _ in range(tokens - 1):
        if held == scale.budget + scale.slack:
            held -= scale.slack
            count += 1
        held += 1
    return count


@pytest.mark.parametrize("scale", [QUICK, LONG, replace(QUICK, budget=300), replace(QUICK, budget=257)])
def test_cuts_are_those_of_a_cache_that_is_filled_token_by_token(scale: Scale) -> None:
    assert scale.slack == {16: 32, 40: 64, 300: 80, 257: 72}[scale.budget]
    for tokens in range(2, 1200, 7):
        truth = Truth([ended(1, tokens - 1, "h2o"), ended(tokens, 1, "window"), ended(tokens, 9, None)], scale, 1)
        count = cuts(tokens, scale), cuts(tokens + 1, scale)
        blocks = scale.slack // scale.block_tokens
        assert truth.budget_tokens() == {
            "h2o kept": total(count[0] * scale.budget),
            "h2o dropped": total(count[0] * scale.slack),
            "window kept": total(count[1] * scale.budget),
            "window dropped": total(count[1] * scale.slack),
        }
        assert truth.evicted_blocks()["h2o"] == total(count[0] * blocks)
        assert truth.evicted_blocks()["window"] == total(count[1] * blocks)
