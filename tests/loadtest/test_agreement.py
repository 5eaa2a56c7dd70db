"""The comparison of load tools: what they report is read right, and held against what the server counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from loadtest.agreement import Row, deviation, main, prompts_of, table
from loadtest.counts import Watch, read
from loadtest.tools import AIPerf, Figures, GuideLLM, Locust, ReportError, SluiceBench, Task, Tool
from server.bench.client import BenchError, Client, Response
from tests.bench.fake_server import Exchange, serving
from tests.test_server import Server

GUIDELLM = {
    "request_totals": {"successful": 8, "errored": 0, "incomplete": 0, "total": 8},
    "output_tokens_per_second": {"successful": {"mean": 12.1, "median": 14.1}},
    "time_to_first_token_ms": {"successful": {"mean": 573.5, "median": 479.6}},
    "inter_token_latency_ms": {"successful": {"mean": 136.0, "median": 130.2}},
}
AIPERF = {
    "request_count": {"unit": "requests", "avg": 8.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 8.24},
    "time_to_first_token": {"unit": "ms", "avg": 685.2, "p50": 557.6},
    "inter_token_latency": {"unit": "ms", "avg": 210.9},
    "error_summary": [],
}
LEVEL = {
    "requests": 8,
    "failures": 0,
    "failure_kinds": {},
    "output_tokens_per_s": 9.0,
    "ttft": {"mean": 0.6, "p50": 0.5},
    "inter_token": {"mean": 0.1},
}


def test_reports_of_the_tools_are_read(tmp_path: Path) -> None:
    """The names and units are those that guidellm 0.8.1 and aiperf 0.13.0 wrote."""
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [{"metrics": GUIDELLM}]}))
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(AIPERF))
    assert GuideLLM("guidellm").figures(tmp_path, b"") == Figures(8, 12.1, 0.5735, 0.4796, 0.136)
    assert AIPerf("aiperf").figures(tmp_path, b"") == Figures(8, 8.24, 0.6852, 0.5576, 0.2109)
    (tmp_path / "report.json").write_text(json.dumps({"levels": [LEVEL]}))
    expected = Figures(8, 9.0, 0.6, 0.5, 0.1)
    assert Locust().figures(tmp_path, b"") == SluiceBench().figures(tmp_path, json.dumps({"levels": [LEVEL]}).encode())
    assert Locust().figures(tmp_path, b"") == expected


def test_failed_requests_are_no_figures(tmp_path: Path) -> None:
    failed = GUIDELLM | {"request_totals": {"successful": 7, "errored": 1, "incomplete": 0, "total": 8}}
    (tmp_path / "report.json").write_text(json.dumps({"benchmarks": [{"metrics": failed}]}))
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(AIPERF | {"error_summary": [{"count": 1}]}))
    for tool in (GuideLLM("guidellm"), AIPerf("aiperf")):
        with pytest.raises(ReportError, match="fail"):
            tool.figures(tmp_path, b"")
    level = LEVEL | {"failures": 1, "failure_kinds": {"HTTP 503: draining": 1}}
    with pytest.raises(ReportError, match="draining"):
        SluiceBench().figures(tmp_path, json.dumps({"levels": [level]}).encode())


@pytest.mark.parametrize(
    "tool", [SluiceBench(), Locust(), GuideLLM("guidellm"), AIPerf("aiperf")], ids=lambda t: t.name
)
@pytest.mark.parametrize("chat", [False, True])
def test_each_is_told_the_same_load(tool: Tool, chat: bool, tmp_path: Path) -> None:
    task = Task("http://h:1", "tiny", chat, 6, 54, 131, 37, 4242, tmp_path / "prompts", tmp_path / "tokenizer")
    command = " ".join(tool.command(task, tmp_path))
    for said in ("http://h:1", "tiny", "6", "54", "37"):
        assert said in command
    assert ("131" in command) == ("4242" in command) == tool.needs_tokenizer
    assert (str(task.tokenizer) in command) == tool.needs_tokenizer
    assert (str(task.prompts) in command) != tool.needs_tokenizer
    assert ("chat" in command) == chat


async def test_a_server_that_names_no_count_is_no_sluice() -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.respond(200, {"tokens": 5})

    async with serving(answer) as url:
        with pytest.raises(BenchError, match="names no count"):
            await prompts_of(Client(url), tokens=5, count=1, seed=0)


def row(name: str, tokens_per_s: float, ttft: float) -> Row:
    return Row(name, tokens_per_s, 100.0, ttft, 0.2, ttft, 0.05, 0.05)


def test_the_worst_tool_decides() -> None:
    rows = [row("a", 100.0, 0.2), row("b", 101.0, 0.2), row("c", 99.0, 0.23)]
    assert deviation(rows) == pytest.approx(0.15)
    assert deviation(rows[:2]) == pytest.approx(0.005, rel=0.01)
    assert deviation(rows[:2], counted=True) == pytest.approx(0.01)
    assert table(rows).splitlines()[3].split()[:5] == ["c", "99.0", "100.0", "0.990", "0.990"]


def test_counts_are_summed_over_labels() -> None:
    values = read(
        b"# TYPE sluice_requests_received_total counter\n"
        b'sluice_requests_received_total{endpoint="chat",model_name="a{b}c"} 2.0\n'
        b'sluice_requests_received_total{endpoint="completions",model_name="a{b}c"} 3.0\n'
        b"process_cpu_seconds_total 9.0\n"
    )
    assert dict(values) == {"requests_received_total": 5.0}


class Scripted(Client):
    """A client whose server has counted so many requests and tokens each time it is asked, a second apart."""

    def __init__(self, counts: list[tuple[int, int]]) -> None:
        self.counts = counts
        self.asked = 0
        self.clock = lambda: float(self.asked)

    async def request(self, method: str, path: str, payload: object = None) -> Response:
        received, tokens = self.counts[min(self.asked, len(self.counts) - 1)]
        self.asked += 1
        names = {"requests_received_total": received, "generation_tokens_total": tokens, "prompt_tokens_total": 7}
        return Response(200, "".join(f"sluice_{name} {value}\n" for name, value in names.items()).encode())


async def test_the_interval_is_from_the_first_request_to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.counts.POLL_SECONDS", 0.0)
    client = Scripted([(4, 10), (4, 10), (5, 10), (6, 20), (6, 30), (6, 30)])
    async with Watch(client) as watch:
        while client.asked < 6:
            await asyncio.sleep(0)
        counts = await watch.counts()
    assert (counts.requests, counts.tokens) == (2, 20)
    assert counts.seconds == 2.0  # between 2 and 3, to between 4 and 5
    assert counts.tokens_per_s == 10.0


@pytest.mark.embedded
def test_bench_and_locust_agree_with_the_server(
    embedded_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine they need not agree with each other, so they may be far apart."""
    server = Server(tmp_path / "log", "--kv-bytes=256MiB")
    report = tmp_path / "report.json"
    options = ["--requests", "8", "--concurrency", "2", "--prompt-tokens", "32", "--output-tokens", "12"]
    try:
        server.wait_until_ready()
        assert main(["--url", server.url, "--turns", "1", "--within", "10", "--json", str(report), *options]) == 0
        assert server.stop() == 0
    finally:
        server.process.kill()
    assert "Left out, as not given: guidellm, aiperf" in capsys.readouterr().out
    tools = json.loads(report.read_text())["tools"]
    for name, extra in (("sluice bench", 1), ("locust", 0)):
        (turn,) = tools[name]
        assert (turn["reported"]["requests"], turn["counted"]["requests"]) == (8, 8 + extra)
        assert turn["counted"]["tokens"] == 8 * 12 + extra
        assert turn["counted"]["cached_tokens"] == 0
        if not extra:
            assert turn["counted"]["prompt_tokens"] == 8 * 32
        assert turn["reported"]["ttft_mean"] == pytest.approx(turn["counted"]["ttft_mean"], rel=0.35)
        assert turn["reported"]["inter_token_mean"] == pytest.approx(turn["counted"]["inter_token_mean"], rel=0.15)
