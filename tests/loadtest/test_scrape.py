"""A router that scrapes a busy server every 50 milliseconds is answered at once, with one series a gauge."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.latency import Latencies
from loadtest.scrape import GAUGES, VLLM_GAUGES, Result, Scrape, run
from server.bench.client import BenchError
from tests.test_server import Server

FAST, SLOW = Latencies([0.01] * 200), Latencies([0.01] * 197 + [0.5] * 3)
TEXT = "".join(f"# TYPE {name} gauge\n{name} 1\n" for name in GAUGES)
VLLM_TEXT = TEXT + "".join(f'# TYPE {name} gauge\n{name}{{engine="0"}} 1\n' for name in VLLM_GAUGES)
TWICE = VLLM_TEXT.replace("# TYPE vllm:gpu_cache", 'vllm:kv_cache_usage_perc{engine="1"} 2\n# TYPE vllm:gpu_cache')


@pytest.mark.parametrize(
    ("text", "not_one"),
    [
        (TEXT, {}),
        (VLLM_TEXT, {}),
        (TWICE, {"vllm:kv_cache_usage_perc": 2}),
        (TEXT.replace("sluice_requests_waiting", "sluice_requests_queued"), {"sluice_requests_waiting": 0}),
    ],
)
def test_a_gauge_that_is_not_one_series_is_found(text: str, not_one: dict[str, int]) -> None:
    assert Scrape.read(text.encode()).not_one == not_one


@pytest.mark.parametrize("body", [b"\xff\xfe", b"sluice_requests_running many\n"])
def test_what_is_no_text_of_metrics_is_said(body: bytes) -> None:
    with pytest.raises(BenchError, match="not in Prometheus' text format"):
        Scrape.read(body)


def test_what_fails() -> None:
    fine, twice = Scrape.read(VLLM_TEXT.encode()), Scrape.read(TWICE.encode())
    assert Result(FAST, FAST, fine, 10, 0).passes(0.1)
    assert not Result(FAST, SLOW, fine, 10, 0).passes(0.1)
    assert not Result(FAST, FAST, twice, 10, 0).passes(0.1)
    assert not Result(FAST, FAST, fine, 10, 1).passes(0.1)
    assert "vllm:kv_cache_usage_perc is 2" in str(Result(FAST, FAST, twice, 10, 0))


@pytest.mark.embedded
async def test_a_busy_server_is_scraped(embedded_path: Path, tmp_path: Path) -> None:
    """`python -m loadtest.scrape` says how fast it is on a machine that does nothing else; this one may be busy."""
    flags = ("--kv-bytes=256MiB", "--max-num-seqs=4", "--metrics-compat=vllm", "--slo-ttft=0.001")
    server = Server(tmp_path / "log", *flags)
    try:
        server.wait_until_ready()
        result = await run(server.url, concurrency=8, seconds=3.0, in_peace_for=0.5)
        assert result.passes(1.0), str(result)
        gauges = result.scrape.gauges
        assert gauges.keys() == {*GAUGES, *VLLM_GAUGES}
        assert gauges["sluice_requests_running_limit"] == 4
        for name in ("requests_running", "requests_waiting"):
            assert gauges[f"sluice_{name}"] > 0
            assert gauges[f"vllm:num_{name}"] > 0
        now = server.settled_metrics()
        assert now["event_loop_lag_seconds_count"] > 10
        assert now["slo_seconds{of=ttft}"] == 0.001
        assert now["request_aborts_total{cause=disconnect}"] > 0  # those that were given up, which broke no promise
        answered = now["requests_total{finish_reason=stop}"] + now["requests_total{finish_reason=length}"]
        assert now["requests_slo_total{met=false}"] == answered >= result.done + 1  # with the one that tried the server
        assert server.stop() == 0
    finally:
        server.process.kill()
