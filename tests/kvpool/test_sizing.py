"""What fits and what is wasted, against filling a pool block by block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.kvpool.layout import (
    CACHE_DTYPES,
    EVERYTHING,
    AttentionKind,
    CacheDtype,
    CacheLayout,
    LayerLayout,
    Visibility,
)
from server.kvpool.sizing import (
    budget_slack,
    longest_sequence,
    most_tokens_held,
    paged,
    reserve_maximum,
    sequence_bytes,
    sequences_that_fit,
    tokens_that_fit,
    usable_blocks,
)

GIB = 2**30
GEMMA_ALL_HEADS = CacheLayout((LayerLayout(AttentionKind.MHA, 32, 128, 128),) * 46, CACHE_DTYPES["bfloat16"], 16)

layers = st.builds(LayerLayout, st.just(AttentionKind.GQA), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9))
dtypes = st.sampled_from(list(CACHE_DTYPES.values()))
layouts = st.builds(
    CacheLayout, st.lists(layers, min_size=1, max_size=4).map(tuple), dtypes, st.integers(1, 32), scored=st.booleans()
)
visibilities = st.sampled_from([EVERYTHING, Visibility(window=5), Visibility(window=12), Visibility(chunk=9)])


@st.composite
def mixed_layouts(draw: st.DrawFn) -> CacheLayout:
    """Layers that look back differently far, most often all of one shape, so that they have tables of their own."""
    seen = draw(st.lists(visibilities, min_size=1, max_size=6))
    shapes = draw(st.lists(layers, min_size=1, max_size=1 if draw(st.integers(0, 3)) else 2))
    return CacheLayout(
        tuple(shapes[index % len(shapes)] for index in range(len(seen))),
        draw(dtypes),
        draw(st.integers(1, 8)),
        tuple(seen),
    )


def most_blocks(layout: CacheLayout, length: int) -> int:
    """Blocks that a sequence holds at most as it grows to `length` token by token, each group for itself."""
    most = 0
    for group in layout.groups:
        seen = (range(group.visibility.first(query), query + 1) for query in range(length))
        most += max(len({key // layout.block_size for key in keys}) for keys in seen)
    return most


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


@given(mixed_layouts(), st.integers(0, 5_000), st.integers(1, 60))
def test_sequences_of_layers_with_windows_take_what_growing_them_shows(
    layout: CacheLayout, nbytes: int, length: int
) -> None:
    windowed = sum(group.visibility.reach is not None for group in layout.groups)
    exact, bound = most_blocks(layout, length), most_blocks(layout, length) + windowed
    free = usable_blocks(layout, nbytes)
    assert free // bound <= sequences_that_fit(layout, nbytes, length) <= free // exact
    assert exact * layout.bytes_per_block <= sequence_bytes(layout, length) <= bound * layout.bytes_per_block
    tokens = tokens_that_fit(layout, nbytes)
    assert tokens % layout.block_size == 0
    assert len(layout.groups) * (tokens // layout.block_size) in range(free - len(layout.groups) + 1, free + 1)


@given(mixed_layouts(), st.integers(0, 3_000))
def test_the_longest_sequence_fits_and_one_more_token_does_not(layout: CacheLayout, nbytes: int) -> None:
    longest = longest_sequence(layout, nbytes)
    if longest is None:
        assert sequences_that_fit(layout, nbytes, 10**9) >= 1
    else:
        assert longest == 0 or sequences_that_fit(layout, nbytes, longest) >= 1
        assert sequences_that_fit(layout, nbytes, longest + 1) == 0


@given(layouts, st.integers(0, 20_000), st.integers(1, 300), st.integers(1, 40))
def test_sequences_with_a_budget_take_what_they_hold_at_most(
    layout: CacheLayout, nbytes: int, length: int, budget: int
) -> None:
    held = most_tokens_held(length, budget, layout.block_size)
    assert sequences_that_fit(layout, nbytes, length, budget) == sequences_that_fit(layout, nbytes, held)
    longest = longest_sequence(layout, nbytes, budget)
    if longest is None:
        assert sequences_that_fit(layout, nbytes, 10**9, budget) >= 1
    else:
        assert sequences_that_fit(layout, nbytes, longest + 1, budget) == 0


@given(mixed_layouts(), st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(60, 80))
def test_what_layers_see_no_more_is_neither_used_nor_reserved(
    layout: CacheLayout, lengths: list[int], longest: int
) -> None:
    def seen(length: int) -> int:
        total = 0
        for layer, visibility in zip(layout.layers, layout.visibilities, strict=True):
            most = max(query + 1 - visibility.first(query) for query in range(length))
            total += most * layer.bytes_per_token(layout.dtype)
        return total

    pages, slabs = paged(layout, lengths, 50_000), reserve_maximum(layout, lengths, longest, 50_000)
    assert pages.used_bytes == slabs.used_bytes == sum(map(seen, lengths))
    assert slabs.allocated_bytes == len(lengths) * seen(longest)
    assert pages.allocated_bytes == sum(sequence_bytes(layout, length) for length in lengths)
    assert pages.wasted_bytes >= 0


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
