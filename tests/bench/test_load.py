"""Loops of load against a server that behaves as told; orders and counts are exact, no test looks at real time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from server.bench.client import BenchError, Client
from server.bench.load import Limits, Run, closed_loop, count_tokens, model_of, open_loop, probe
from server.bench.workload import Workload
from tests.bench.fake_server import Exchange, serving, well_behaved


def workload(tokens: int = 3) -> Workload:
    return Workload(["one", "two words"], "fake", tokens, run="t")


def failures(run: Run) -> list[str | None]:
    return [record.failure for record in run.records]


async def test_closed_loop_keeps_exactly_so_many_requests_open() -> None:
    open_now = most = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(5):
            await asyncio.sleep(0)
        open_now -= 1
        await well_behaved(exchange)

    seen: list[tuple[int, int]] = []
    async with serving(handler) as url:
        run = await closed_loop(Client(url), workload(), 4, Limits(10), lambda *counts: seen.append(counts))
    assert failures(run) == [None] * 10
    assert [record.completion_tokens for record in run.records] == [3] * 10
    assert {record.prompt_tokens for record in run.records} == {2, 3}
    assert 1 < most <= 4
    assert seen == [(n, 0) for n in range(1, 11)]
    assert run.seconds > 0


async def test_a_duration_stops_sending_and_lets_open_requests_finish() -> None:
    now = 0.0

    async def handler(exchange: Exchange) -> None:
        nonlocal now
        now += 1.0  # each request takes a second of the injected clock
        await well_behaved(exchange)

    async with serving(handler) as url:
        run = await closed_loop(Client(url, clock=lambda: now), workload(), 1, Limits(seconds=3.0))
    assert failures(run) == [None] * 3
    assert run.seconds == 3.0


async def test_open_loop_sends_without_waiting_and_counts_from_the_due_time() -> None:
    """Each answer waits for a later request, which a closed loop would never send."""
    arrived = 0
    all_there = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == 6:
            all_there.set()
        await all_there.wait()
        await well_behaved(exchange)

    due = [0.0, 0.001, 0.002, 0.003, 0.004, 0.005]
    async with serving(handler) as url:
        run = await open_loop(Client(url), workload(), iter(due), Limits(6))
    assert failures(run) == [None] * 6
    start = run.records[0].intended
    assert [record.intended - start for record in run.records] == pytest.approx(due)
    for record in run.records:
        assert record.sent is not None
        assert record.sent >= record.intended
        assert record.ttft == record.arrivals[0] - record.intended


async def test_open_loop_ends_with_requests_or_duration() -> None:
    def steps() -> Iterator[float]:
        due = 0.0
        while True:
            due += 0.001
            yield due

    async with serving(well_behaved) as url:
        assert len((await open_loop(Client(url), workload(), steps(), Limits(4))).records) == 4
        assert len((await open_loop(Client(url), workload(), steps(), Limits(None, 0.0065))).records) == 6


async def test_failures_stay_in_the_run_among_the_good() -> None:
    number = 0

    async def handler(exchange: Exchange) -> None:
        nonlocal number
        number += 1
        if number % 5 == 1:
            exchange.respond(503, {"error": {"message": "full"}})
        elif number % 5 == 2:
            exchange.begin()
            exchange.text("a", 1)
            exchange.cut()
        elif number % 5 == 3:
            exchange.begin()
            exchange.text("a", 1)
            exchange.event({"error": {"message": "died"}})
            await asyncio.Event().wait()  # the client must not wait for more
        elif number % 5 == 4:
            exchange.cut()
        else:
            await well_behaved(exchange)

    async with serving(handler) as url:
        run = await closed_loop(Client(url), workload(), 1, Limits(10))
    assert (
        failures(run)
        == [
            "HTTP 503: full",
            "stream cut before its end",
            "error event: died",
            "connection closed before a response",
            None,
        ]
        * 2
    )


async def test_a_server_that_is_away_or_silent_is_a_failure() -> None:
    async def silent(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    async with serving(silent) as url:
        run = await closed_loop(Client(url, timeout=0.05), workload(), 1, Limits(1))
        assert failures(run) == ["no end of the stream within 0.05 s"]
    run = await closed_loop(Client(url), workload(), 2, Limits(2))
    assert all("connection failed" in str(failure) for failure in failures(run))


async def test_several_tokens_in_a_chunk_and_a_first_token_that_takes_long() -> None:
    now = 100.0

    async def handler(exchange: Exchange) -> None:
        nonlocal now
        exchange.begin()
        for after, text, total in ((7.0, "abc", 3), (1.0, "d", 4), (4.0, "ef", 6)):
            now += after
            exchange.text(text, total, "length" if total == 6 else None)
            await asyncio.sleep(0.02)  # lets each chunk be read by itself, at its own time
        exchange.done(6)

    async with serving(handler) as url:
        run = await closed_loop(Client(url, clock=lambda: now), workload(6), 1, Limits(1))
    (record,) = run.records
    assert record.failure is None
    assert record.ttft == 7.0
    assert record.inter_token().tolist() == [1.0, 2.0, 2.0]
    assert record.e2e == 12.0


async def test_key_path_and_body_reach_the_server() -> None:
    seen: list[Exchange] = []

    async def handler(exchange: Exchange) -> None:
        seen.append(exchange)
        exchange.path = exchange.path.removeprefix("/proxy")
        await well_behaved(exchange)

    async with serving(handler) as url:
        client = Client(f"{url}/proxy/v1/", api_key="secret")
        assert await model_of(client) == "fake"
        assert await count_tokens(client, workload(), "three words here") == 3
    assert seen[0].headers["authorization"] == "Bearer secret"
    assert seen[1].body["max_tokens"] == 1


@pytest.mark.parametrize(
    ("refused", "missing"),
    [
        ((), []),
        (("continuous_usage_stats",), ["stream_options.continuous_usage_stats"]),
        (("continuous_usage_stats", "ignore_eos"), ["ignore_eos", "stream_options.continuous_usage_stats"]),
        (("ignore_eos", "stream_options"), ["ignore_eos", "stream_options.include_usage"]),
    ],
)
async def test_the_probe_leaves_out_what_a_server_refuses(refused: tuple[str, ...], missing: list[str]) -> None:
    async def picky(exchange: Exchange) -> None:
        options = exchange.body.get("stream_options", {})
        if bad := [name for name in refused if name in exchange.body or name in options]:
            exchange.respond(400, {"error": {"message": f"unknown {bad}"}})
        else:
            await well_behaved(exchange)

    async with serving(picky) as url:
        work = workload()
        assert await probe(Client(url), work) == missing
        assert not [name for name in refused if name in str(work.extras)]
        run = await closed_loop(Client(url), work, 1, Limits(2))
    assert failures(run) == [None, None]


async def test_a_server_that_serves_nothing_is_named() -> None:
    async def wrong(exchange: Exchange) -> None:
        exchange.respond(404, {"error": {"message": "no model fake here"}})

    async with serving(wrong) as url:
        with pytest.raises(BenchError, match="no model fake here"):
            await probe(Client(url), workload())
        with pytest.raises(BenchError, match="no model fake here"):
            await model_of(Client(url))
    with pytest.raises(BenchError, match="does not answer"):
        await model_of(Client(url))
    with pytest.raises(BenchError, match="not an http"):
        Client("ftp://somewhere")
