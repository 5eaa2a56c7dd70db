"""The comparison's bookkeeping, with both sides faked; the bare loop itself is tested in test_bare.py."""

from __future__ import annotations

import json
import re
import sys

import pytest

from server.bench.baseline import BareResult, Comparison, bare_process, compare_with_bare
from server.bench.client import BenchError, Client
from server.bench.load import Run
from server.bench.record import Record
from server.bench.report import Level, summarize
from server.bench.workload import Workload
from tests.bench.fake_server import Exchange, serving, well_behaved

BARE = (sys.executable, "-m", "tests.bench.fake_bare")
EXTRAS = {"ignore_eos": True}


async def compare(url: str, flags: tuple[str, ...] = ()) -> Comparison:
    workload = Workload(["some text", "other text"], "fake", 5, run="t", extras=EXTRAS)
    async with bare_process(flags, BARE) as bare:
        return await compare_with_bare(
            Client(url), workload, bare, batch=4, requests=8, input_tokens=6, turns=2, show=lambda _: None
        )


async def test_both_sides_do_the_same_work_in_turns() -> None:
    prompts: list[tuple[int, ...]] = []

    async def handler(exchange: Exchange) -> None:
        prompts.append(tuple(exchange.body["prompt"]))
        assert exchange.body["ignore_eos"] is True
        await well_behaved(exchange)

    async with serving(handler) as url:
        result = await compare(url)
    assert [len(prompt) for prompt in prompts] == [6] * 16  # 2 turns of 8
    assert result.cache == "static"
    assert result.trials == {"dynamic": 10.0, "static": 20.0}
    assert [turn.seconds for turn in result.bare] == [2.0, 2.0]
    assert [level.output_tokens for level in result.served] == [40, 40]
    assert result.ratio > 0
    text = result.table()
    assert re.search(r"bare loop, static cache +20\.0", text)
    assert "sdpa attention in float32 on cpu, 2 threads, and spends 25% of its time on prompts" in text
    assert json.loads(json.dumps(result.json()))["ratio"] == result.ratio


def level(rate: float) -> Level:
    record = Record(0.0, 0.0, 1.0, [0.5], [1], completion_tokens=int(rate), prompt_tokens=1, finish_reason="length")
    return summarize("4 clients", Run((record,), 0.0))


def test_the_ratio_is_of_medians_and_the_spread_of_turns() -> None:
    served = (level(80), level(95), level(90))
    bare = (BareResult(1.0, 0.5, 100), BareResult(1.0, 0.5, 100), BareResult(1.0, 0.5, 120))
    about = {"threads": 1, "device": "cpu", "dtype": "float32", "attention": "sdpa"}
    result = Comparison(4, 6, 5, 4, "dynamic", {}, about, served, bare)
    assert result.ratio == pytest.approx(0.9)
    assert result.ratios == pytest.approx([0.8, 0.95, 0.75])
    assert "ratio 0.900 (turns 0.750 to 0.950)" in result.table()


async def test_a_failed_request_voids_the_comparison() -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.respond(503, {"error": {"message": "full"}})

    async with serving(handler) as url:
        with pytest.raises(BenchError, match="8 of 8 requests failed in turn 1: HTTP 503: full"):
            await compare(url)


async def test_short_answers_void_the_comparison() -> None:
    async def handler(exchange: Exchange) -> None:
        exchange.body["max_tokens"] -= 1
        await well_behaved(exchange)

    async with serving(handler) as url:
        with pytest.raises(BenchError, match="only 32 tokens"):
            await compare(url)


async def test_a_bare_loop_that_dies_says_why() -> None:
    async with serving(well_behaved) as url:
        with pytest.raises(BenchError, match="out of memory"):
            await compare(url, ("--fail",))
