from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from server.bench.lengths import OUTPUT_TOKENS, PROMPT_TOKENS, SPREAD, lognormal, mixed
from server.bench.workload import load_prompts

TEXT = "\n\n".join(load_prompts())
TAG = "[ab12-100] "


async def count(prompt: str) -> int:
    """A tokenizer of 3 characters a token, all of them alike."""
    return -(-len(prompt) // 3)


@pytest.mark.parametrize("mean", [PROMPT_TOKENS, OUTPUT_TOKENS])
def test_lengths_are_lognormal_and_of_their_mean(mean: int) -> None:
    found = lognormal(mean)
    assert fmean(found) == pytest.approx(mean, abs=0.5)
    logarithms = [math.log(length) for length in found]
    assert stdev(logarithms) == pytest.approx(SPREAD, rel=0.05)
    assert fmean(logarithms) == pytest.approx(math.log(mean) - SPREAD**2 / 2, rel=0.02)  # the mean of a lognormal
    assert found == sorted(found)
    assert found[0] > len(TAG) / 3 + 2  # a tag fits


async def test_prompts_are_as_long_as_asked_with_their_tags() -> None:
    asked = await mixed(TEXT, TAG, count, seed=0)
    tokens = sorted([await count(TAG + prompt) for prompt, _ in asked])
    assert all(abs(got - wanted) <= 2 for got, wanted in zip(tokens, lognormal(PROMPT_TOKENS), strict=True))
    assert sorted(output for _, output in asked) == lognormal(OUTPUT_TOKENS)
    assert len({prompt for prompt, _ in asked}) == len(asked)
    assert len({prompt[:20] for prompt, _ in asked}) > 0.9 * len(asked)  # not all the same beginning


async def test_a_mix_is_the_same_again_and_long_prompts_do_not_all_have_long_answers() -> None:
    asked = await mixed(TEXT, TAG, count, seed=0)
    assert asked == await mixed(TEXT, TAG, count, seed=0)
    assert asked != await mixed(TEXT, TAG, count, seed=1)
    outputs = [output for _, output in asked]
    assert outputs != sorted(outputs)


async def test_a_short_text_is_repeated() -> None:
    asked = await mixed("Once upon a time.", "", count, seed=0)
    assert max(len(prompt) for prompt, _ in asked) == pytest.approx(3 * lognormal(PROMPT_TOKENS)[-1], abs=9)


def test_a_realistic_mix_leaves_little_of_a_paged_cache_empty() -> None:
    """What `sluice bench --lengths mixed` should find: half a block of each sequence, for as long as it runs."""
    block, empty, held = 16, 0, 0
    for prompt, output in zip(lognormal(PROMPT_TOKENS), reversed(lognormal(OUTPUT_TOKENS)), strict=True):
        for tokens in range(prompt, prompt + output):
            blocks = -(-tokens // block)
            held += blocks * block
            empty += blocks * block - tokens
    assert 0.01 < empty / held < 0.04
