"""The cache formula on models whose numbers are public."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout, attention_kind
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
