"""The cache formula on models whose numbers are public."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.kvpool.layout import (
    CACHE_DTYPES,
    EVERYTHING,
    AttentionKind,
    CacheLayout,
    LayerLayout,
    Visibility,
    attention_kind,
    group_layers,
    held_blocks,
)
from server.kvpool.shapes import read_shape

GIB = 2**30
CONFIGS = Path(__file__).parents[2] / "docs" / "configs"


DEEPSEEK_V3 = CacheLayout((LayerLayout(AttentionKind.MLA, 1, 576, 0, 64),) * 61, CACHE_DTYPES["bfloat16"], 16)


def uniform(layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16", heads: int = 64) -> CacheLayout:
    layer = LayerLayout(attention_kind(heads, kv_heads), kv_heads, head_dim, head_dim)
    return CacheLayout((layer,) * layers, CACHE_DTYPES[dtype], 16)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param(uniform(80, 8, 128), 327_680, id="llama-3-70b"),
        pytest.param(uniform(80, 64, 128), 2_621_440, id="llama-3-70b multi-head"),
        pytest.param(uniform(32, 8, 128), 131_072, id="llama-3.1-8b"),
        pytest.param(uniform(46, 16, 128), 376_832, id="gemma-2-27b"),
        pytest.param(uniform(46, 32, 128), 753_664, id="gemma-2-27b multi-head"),
        pytest.param(uniform(30, 3, 64, dtype="float32"), 46_080, id="smollm2-135m float32"),
        pytest.param(
            CacheLayout((LayerLayout(AttentionKind.MLA, 1, 576, 0),) * 61, CACHE_DTYPES["bfloat16"], 16),
            70_272,
            id="deepseek-v3",
        ),
    ],
)
def test_bytes_per_token(layout: CacheLayout, expected: int) -> None:
    assert layout.bytes_per_token == expected
    assert layout.bytes_per_block == 16 * expected


def test_llama_3_70b_sequences() -> None:
    """8,192 tokens take 2.5 GiB, not the 40 GB often quoted; 20 GiB with every head cached."""
    assert uniform(80, 8, 128).bytes_per_token * 8192 == 2.5 * GIB
    assert uniform(80, 8, 128).bytes_per_token * 8192 * 32 == 80 * GIB
    assert uniform(80, 64, 128).bytes_per_token * 8192 == 20 * GIB


def test_latent_is_a_seventy_first_of_the_expanded_cache() -> None:
    shape = read_shape(json.loads((CONFIGS / "deepseek-v3.json").read_text()))
    latent, expanded = (variant.layout(CACHE_DTYPES["bfloat16"], 16) for variant in (shape, shape.sharing(None)))
    assert latent.bytes_per_token == 70_272
    assert expanded.bytes_per_token == 61 * 81_920
    assert expanded.bytes_per_token // latent.bytes_per_token == 71


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kind"),
    [(32, 32, AttentionKind.MHA), (32, 8, AttentionKind.GQA), (32, 1, AttentionKind.MQA), (1, 1, AttentionKind.MHA)],
)
def test_attention_kind(heads: int, kv_heads: int, kind: AttentionKind) -> None:
    assert attention_kind(heads, kv_heads) is kind


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (8192, 512)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert uniform(1, 1, 1).blocks_for(tokens) == blocks


@pytest.mark.parametrize(
    "visibility",
    [
        EVERYTHING,
        *(Visibility(window=window) for window in (1, 2, 3, 5, 8, 13)),
        *(Visibility(chunk=chunk) for chunk in (1, 2, 4, 6)),
        Visibility(window=3, chunk=4),
        Visibility(window=7, chunk=5),
    ],
    ids=str,
)
def test_held_blocks_are_those_that_some_step_touches(visibility: Visibility) -> None:
    """Every first token of a step and every length. A chunk begins at a block's edge more often than a window does."""
    for size, step_tokens in product((1, 2, 3, 4, 7), (1, 2, 3, 5, 9)):
        most = 0
        for num_tokens in range(1, 31):
            for count in range(1, min(step_tokens, num_tokens) + 1):
                first = visibility.first(num_tokens - count)
                most = max(most, len({key // size for key in range(first, num_tokens)}))
            held = held_blocks(visibility, num_tokens, size, step_tokens)
            assert held >= most
            if visibility.chunk is None:
                whole = len(range(0, num_tokens, size)) if visibility.reach is None else most
                assert held == whole
        assert held_blocks(visibility, 0, size, step_tokens) == 0


layers = st.builds(LayerLayout, st.just(AttentionKind.GQA), st.integers(1, 3), st.integers(1, 5), st.integers(0, 5))
visibilities = st.sampled_from(
    [EVERYTHING, Visibility(window=5), Visibility(window=9), Visibility(chunk=9), Visibility(window=5, chunk=9)]
)


@given(st.data(), st.lists(visibilities, min_size=1, max_size=14), st.integers(1, 4), st.booleans())
def test_layers_are_divided_as_promised(data: st.DataObject, seen: list[Visibility], size: int, scored: bool) -> None:
    widths = data.draw(st.lists(layers, min_size=1, max_size=1 if data.draw(st.integers(0, 3)) else 2))
    shapes = [widths[index % len(widths)] for index in range(len(seen))]
    groups = group_layers(shapes, seen)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(seen)))

    kinds = Counter(seen)
    if len(kinds) > 1 and len(set(shapes)) > 1:
        assert [group.visibility for group in groups] == [EVERYTHING], "layers of different widths are not divided"
    else:
        for group in groups:
            assert {seen[layer] for layer in group.layers} == {group.visibility}
            assert list(group.layers) == sorted(group.layers)
    if len(groups) > 1:
        places = len(groups[0].layers)
        reaches = [10**9 if kind.reach is None else kind.reach for kind in kinds]
        farthest = groups[0].visibility
        assert (10**9 if farthest.reach is None else farthest.reach) == max(reaches)
        assert kinds[farthest] % places == 0, "the cache that grows has empty places"
        assert places <= min(kinds.values())
        larger = range(places + 1, min(kinds.values()) + 1)
        assert all(kinds[farthest] % count for count in larger), "there could be fewer tables"
        for kind, count in kinds.items():
            sizes = [len(group.layers) for group in groups if group.visibility == kind]
            assert sum(sizes) == count
            assert sizes[:-1] == [places] * (len(sizes) - 1)
            assert 0 < sizes[-1] <= places

    layout = CacheLayout(tuple(shapes), CACHE_DTYPES["int8"], size, tuple(seen), scored)
    assert layout.groups == groups
    filled = [
        size * sum(shapes[layer].bytes_per_token(layout.dtype, scored) for layer in group.layers) for group in groups
    ]
    assert layout.bytes_per_block == max(filled)
    assert layout.bytes_per_token == sum(filled) / size
