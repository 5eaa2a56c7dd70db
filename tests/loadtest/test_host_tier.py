"""The proof of host memory: its sizes leave room for what it wants to happen, and it sees what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.host_tier import ANSWER, BLOCK, CROWD_PROMPT, Counts, Outcome, Shape, Side, Stream, Turn
from loadtest.replicas import Replica
from server.bench.client import BenchError
from tests.bench.fake_server import Exchange, serving

PAGE = """\
# TYPE sluice_requests_running gauge
sluice_requests_running{model_name="m"} 0.0
# TYPE sluice_requests_waiting gauge
sluice_requests_waiting{model_name="m"} 0.0
# TYPE sluice_requests_received_total counter
sluice_requests_received_total{endpoint="completions",model_name="m",streaming="true"} 5.0
sluice_requests_received_total{endpoint="chat",model_name="m",streaming="true"} 2.0
# TYPE sluice_requests_total counter
sluice_requests_total{endpoint="completions",finish_reason="length",model_name="m"} 5.0
sluice_requests_total{endpoint="chat",finish_reason="stop",model_name="m"} 2.0
# TYPE sluice_preemptions_total counter
sluice_preemptions_total{model_name="m"} 3.0
# TYPE sluice_kv_cache_capacity_blocks gauge
sluice_kv_cache_capacity_blocks{model_name="m"} 20.0
# TYPE sluice_kv_cache_blocks gauge
sluice_kv_cache_blocks{model_name="m",state="used"} 0.0
sluice_kv_cache_blocks{model_name="m",state="cached"} 12.0
sluice_kv_cache_blocks{model_name="m",state="free"} 8.0
# TYPE sluice_kv_cache_host_blocks gauge
sluice_kv_cache_host_blocks{model_name="m",state="used"} 4.0
sluice_kv_cache_host_blocks{model_name="m",state="free"} 3.0
# TYPE sluice_kv_cache_host_copied_blocks_total counter
sluice_kv_cache_host_copied_blocks_total{direction="save",model_name="m"} 9.0
sluice_kv_cache_host_copied_blocks_total{direction="load",model_name="m"} 6.0
# TYPE sluice_kv_cache_host_evicted_blocks_total counter
sluice_kv_cache_host_evicted_blocks_total{model_name="m"} 5.0
# TYPE sluice_kv_copy_seconds histogram
sluice_kv_copy_seconds_bucket{le="+Inf",model_name="m"} 2.0
sluice_kv_copy_seconds_count{model_name="m"} 2.0
sluice_kv_copy_seconds_sum{model_name="m"} 0.25
"""
COUNTS = Counts.read(PAGE)


@given(tokens=st.integers(1000, 20_000), crowd=st.integers(1, 32))
def test_both_fit_at_first_and_not_in_the_end(tokens: int, crowd: int) -> None:
    shape = Shape(tokens, crowd)

    def blocks(length: int) -> int:
        return -(-length // BLOCK)

    started = blocks(tokens + 1) + crowd * blocks(CROWD_PROMPT + 1)
    assert started + crowd <= shape.pool_blocks, "the long request is never admitted"  # with a block more for each
    grown = crowd * blocks(CROWD_PROMPT + shape.crowd_tokens)
    assert grown <= shape.pool_blocks, "the crowd preempts itself"
    assert grown + shape.long_blocks > shape.pool_blocks, "nobody is in the way of the other"
    assert shape.pool_blocks - grown < crowd + 5, "most of the long request stays in the pool"
    assert ANSWER >= 3 * BLOCK, "the long request may be done before the crowd has grown"
    assert 0 < shape.full_tier_blocks < shape.long_blocks


def test_counts_are_read_by_name_and_label() -> None:
    assert replace(COUNTS, blocks={}, host_blocks={}) == Counts(
        running=0, waiting=0, received=7, finished=7, preemptions=3, capacity=20, blocks={}, host_blocks={},
        saved=9, loaded=6, forgotten=5, copy_seconds=0.25,
    )  # fmt: skip
    assert COUNTS.blocks == {"used": 0, "cached": 12, "free": 8}
    assert COUNTS.host_blocks == {"used": 4, "free": 3}


def test_what_is_lost_is_named() -> None:
    assert COUNTS.losses(7) == []
    assert COUNTS.losses(8) == ["those of host memory are 7, not 8"]
    assert replace(COUNTS, finished=6).losses(7) == ["7 requests came, 6 ended"]
    assert "the blocks of the pool are 20, not 21" in replace(COUNTS, capacity=21).losses(7)
    held = replace(COUNTS, blocks={"used": 2, "cached": 10, "free": 8}).losses(7)
    assert held == ["2 blocks are in use, 0 requests run"]


def outcome(resumes: Sequence[float], texts: Sequence[str] = ("a", "a", "a"), forgotten: float = 5) -> Outcome:
    """Of one turn on each of the three sides."""
    sides = []
    for number, (name, resume, text) in enumerate(zip(("none", "1GiB", "7 blocks"), resumes, texts, strict=True)):
        counts = replace(COUNTS, forgotten=forgotten, host_blocks={"used": 7.0 * (number > 0), "free": 0})
        server = Replica(name, 1, (), Path("none.log"))
        sides.append(Side(name, 7 * (number > 0), server, [Turn(resume, text)], counts))
    return Outcome(sides, ["a"])


def test_a_good_outcome_and_its_table() -> None:
    good = outcome((0.8, 0.2, 0.6))
    assert good.problems() == []
    lines = good.table().splitlines()
    assert lines[2].split() == ["1GiB", "200", "ms", "0.250", "250", "ms", "9", "6", "5", "1", "of", "1"]
    assert lines[1].split()[:4] == ["none", "800", "ms", "1.000"]


def test_what_is_wrong_is_told() -> None:
    assert outcome((0.8, 0.9, 0.6)).problems() == ["host memory made nothing faster"]
    assert outcome((0.8, 0.2, 0.6), ("a", "b", "a")).problems() == ["1GiB: the text is another in 1 turns"]
    assert outcome((0.8, 0.2, 0.6), forgotten=0).problems() == ["7 blocks: it was never full"]


async def test_a_stream_tells_its_text_and_when_it_came() -> None:
    async def handle(exchange: Exchange) -> None:
        assert exchange.body == {"prompt": [1], "max_tokens": 2}
        exchange.begin()
        exchange.text("", None)
        exchange.text("one ", None)
        await asyncio.sleep(0.05)
        exchange.text("two", None, "length")
        exchange.done()

    async with serving(handle) as url:
        stream = Stream(url, {"prompt": [1], "max_tokens": 2})
        await stream.begun()
        await stream.ended()
    assert stream.text == "one two"
    assert len(stream.arrivals) == 2
    assert stream.arrivals[1] - stream.arrivals[0] > 0.03


@pytest.mark.parametrize("ending", ["refusal", "error", "cut"])
async def test_a_stream_that_fails_is_an_error(ending: str) -> None:
    async def handle(exchange: Exchange) -> None:
        if ending == "refusal":
            exchange.respond(400, {"error": {"message": "no"}})
            return
        exchange.begin()
        if ending == "error":
            exchange.event(json.dumps({"error": {"message": "no"}}))
            exchange.done()
        else:
            exchange.text("one", None)
            exchange.cut()

    async with serving(handle) as url:
        stream = Stream(url, {})
        with pytest.raises(BenchError, match="a request failed"):
            await stream.ended()
