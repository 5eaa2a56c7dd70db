"""What fits and what is wasted, against filling a pool block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheDtype, CacheLayout, LayerLayout
from server.kvpool.sizing import (
    budget_slack,
    most_tokens_held,
    paged,
    reserve_maximum,
    sequences_that_fit,
    tokens_that_fit,
    usable_blocks,
)

GIB = 2**30
GEMMA_ALL_HEADS = CacheLayout((LayerLayout(AttentionKind.MHA, 32, 128, 128),) * 46, CACHE_DTYPES["bfloat16"], 16)

layouts = st.builds(
    CacheLayout,
    st.lists(
        st.builds(LayerLayout, st.just(AttentionKind.GQA), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9)),
        min_size=1,
        max_size=4,
    ).map(tuple),
    st.sampled_from(list(CACHE_DTYPES.values())),
    st.integers(1, 32),
)


def test_gemma_2_27b_with_all_heads_cached_fills_80_gib_with_114_000_tokens() -> None:
    assert tokens_that_fit(GEMMA_ALL_HEADS, 80 * GIB) == pytest.approx(114_000, rel=0.001)


def test_32_sequences_of_llama_3_70b_need_80_gib_and_the_trash_block() -> None:
    layout = CacheLayout((LayerLayout(AttentionKind.GQA, 8, 128, 128),) * 80, CACHE_DTYPES["bfloat16"], 16)
    assert sequences_that_fit(layout, 80 * GIB, 8192) == 31
    assert sequences_that_fit(layout, 80 * GIB + layout.bytes_per_block, 8192) == 32


@given(layouts, st.integers(0, 200_000), st.integers(1, 100))
def test_what_fits_equals_filling_block_by_block(layout: CacheLayout, nbytes: int, length: int) -> None:
    blocks, left = 0, nbytes
    while left >= layout.bytes_per_block:
        blocks, left = blocks + 1, left - layout.bytes_per_block
    free = max(0, blocks - 1)  # block 0 is the trash block
    assert usable_blocks(layout, nbytes) == free
    assert tokens_that_fit(layout, nbytes) == free * layout.block_size
    sequences = 0
    while True:
        needed = len(range(0, length, layout.block_size))
        if needed > free:
            break
        free, sequences = free - needed, sequences + 1
    assert sequences_that_fit(layout, nbytes, length) == sequences


@pytest.mark.parametrize(
    ("budget", "block_size", "slack"),
    [(1, 16, 64), (256, 16, 64), (257, 16, 80), (1024, 16, 256), (1000, 16, 256), (1025, 16, 272), (64, 1, 16)],
)
def test_the_slack_is_a_quarter_of_the_budget_in_whole_blocks_and_at_least_four(
    budget: int, block_size: int, slack: int
) -> None:
    assert budget_slack(budget, block_size) == slack


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 16))
def test_a_budgeted_sequence_holds_what_growing_it_token_by_token_shows(
    length: int, budget: int, block_size: int
) -> None:
    held = most = 0
    for _ in range(length):
        if held == budget + budget_slack(budget, block_size):
            held = budget
        held += 1
        most = max(most, held)
    assert most_tokens_held(length, budget, block_size) == most
    assert most_tokens_held(length, None, block_size) == length


@given(layouts, st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(60, 100))
def test_waste_equals_counting_empty_places(layout: CacheLayout, lengths: list[int], longest: int) -> None:
    nbytes = 50_000
    pages, slabs = paged(layout, lengths, nbytes), reserve_maximum(layout, lengths, longest, nbytes)
    empty_in_last_blocks = sum(-length % layout.block_size for length in lengths)
    assert pages.wasted_bytes == empty_in_last_blocks * layout.bytes_per_token
    assert slabs.wasted_bytes == sum(longest - length for length in lengths) * layout.bytes_per_token
    assert pages.used_bytes == slabs.used_bytes == sum(lengths) * layout.bytes_per_token
    assert pages.wasted_bytes < len(lengths) * layout.bytes_per_block
    for taken in (pages, slabs):
        assert taken.waste_ratio == pytest.approx(1 - taken.used_bytes / taken.allocated_bytes)
    assert slabs.at_once * longest * layout.bytes_per_token <= nbytes
    assert pages.at_once * pages.allocated_bytes <= nbytes * len(lengths)


def test_at_once_is_counted_at_the_mean_size() -> None:
    layout = CacheLayout((LayerLayout(AttentionKind.MQA, 1, 1, 1),), CacheDtype("byte", 1), 16)
    nbytes = layout.bytes_per_block * 13  # 12 to use
    lengths = [16, 17, 48]  # 1 + 2 + 3 blocks, 2 on average
    assert paged(layout, lengths, nbytes).at_once == 6
    assert reserve_maximum(layout, lengths, 64, nbytes).at_once == 13 * 16 // 64


@pytest.mark.parametrize("lengths", [[], [0], [5, -1]])
def test_lengths_are_checked(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        paged(GEMMA_ALL_HEADS, lengths, GIB)
    with pytest.raises(ValueError, match="at least 1 token"):
        reserve_maximum(GEMMA_ALL_HEADS, lengths, 100, GIB)


def test_a_slab_holds_the_longest() -> None:
    with pytest.raises(ValueError, match="longer than the 100 to reserve"):
        reserve_maximum(GEMMA_ALL_HEADS, [101], 100, GIB)
