"""The locust file as a user runs it, in a process of its own, against a server whose pace and faults are known."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.fake_llm import CHUNK, GAP_SECONDS, TTFT_SECONDS

ROOT = Path(__file__).parents[2]
LOCUST = (sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary")


@dataclass
class Outcome:
    """What locust said, and what the server knows of it."""

    status: int
    text: str
    summary: dict[str, Any]
    server: dict[str, Any]

    @property
    def levels(self) -> dict[str, dict[str, Any]]:
        return {level["load"]: level for level in self.summary["levels"]}


class Fake:
    """The paced server in a process of its own."""

    def __init__(self, notes: Path, fault_every: int) -> None:
        self.notes = notes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.loadtest.fake_llm", str(notes), str(fault_every)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def stop(self) -> dict[str, Any]:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(10) == 0
        return dict(json.loads(self.notes.read_text()))


def locust(tmp_path: Path, *options: str, fault_every: int = 0) -> Outcome:
    fake = Fake(tmp_path / "notes", fault_every)
    summary = tmp_path / "summary.json"
    try:
        run = subprocess.run(
            [*LOCUST, "-H", fake.url, "--summary", str(summary), "--output-tokens", "8", *options],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
        return Outcome(run.returncode, run.stdout + run.stderr, json.loads(summary.read_text()), fake.stop())
    finally:
        fake.process.kill()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The whole mix for some seconds."""
    return locust(tmp_path_factory.mktemp("mixed"), "-u", "10", "-r", "10", "-t", "4s")


def test_a_good_run_exits_with_0(mixed: Outcome) -> None:
    assert mixed.status == 0, mixed.text
    assert mixed.levels["all"]["failures"] == mixed.summary["given_up"] == 0


def test_every_kind_has_rows_of_its_latencies(mixed: Outcome) -> None:
    for kind in ("short", "long", "prefix", "chat"):
        for row in ("ttft", "itl mean", "itl max", "e2e"):
            assert f"LLM      {kind} {row} " in mixed.text
    assert "LLM      whole e2e " in mixed.text
    assert "LLM      whole ttft " not in mixed.text
    assert set(mixed.levels) == {"all", "short", "long", "prefix", "chat", "whole"}


def test_counts_are_those_of_the_server(mixed: Outcome) -> None:
    assert mixed.levels["all"]["requests"] == mixed.server["answers"]
    assert mixed.levels["all"]["output_tokens"] == mixed.server["tokens"]


def test_latencies_are_those_of_the_server(mixed: Outcome) -> None:
    """A busy machine adds to them, so only a lower bound is firm."""
    level = mixed.levels["short"]
    assert TTFT_SECONDS <= level["ttft"]["mean"] < TTFT_SECONDS * 1.5
    assert GAP_SECONDS * 0.95 <= level["chunk_gap"]["p50"] < GAP_SECONDS * 1.3
    assert level["inter_token"]["mean"] == pytest.approx(level["chunk_gap"]["mean"] / CHUNK)
    chunks = 8 // CHUNK
    assert level["e2e"]["mean"] == pytest.approx(
        level["ttft"]["mean"] + (chunks - 1) * level["chunk_gap"]["mean"], 0.05
    )


def test_a_history_grows_and_starts_again(mixed: Outcome) -> None:
    assert mixed.server["largest_history"] in (5, 7)


def test_streams_that_end_badly_are_failures_with_their_reason(tmp_path: Path) -> None:
    outcome = locust(tmp_path, "-u", "4", "-r", "4", "--requests", "24", "ShortPrompt", fault_every=3)
    assert outcome.status == 1
    level = outcome.levels["all"]
    assert level["failure_kinds"] == {
        "error event: out of memory": 2,
        "stream cut before its end": 2,
        "stream ended without a finish_reason": 2,
        "HTTP 429: the queue is full": 2,
    }
    assert (level["requests"], level["failures"]) == (24, 8)
    assert level["output_tokens"] == outcome.server["tokens"] == 16 * 8
    for reason in level["failure_kinds"]:
        assert reason in outcome.text


def test_a_server_that_is_not_there_makes_the_status_1(tmp_path: Path) -> None:
    options = ["-H", "http://127.0.0.1:9", "-u", "1", "-t", "5s"]
    run = subprocess.run([*LOCUST, *options], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.returncode == 1
    assert "http://127.0.0.1:9/v1/models names no model" in run.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--shape", "ramp", "-u", "3"], "use --shape-users and --shape-time"),
        (["--constant-throughput", "1", "--think-time", "1"], "leave out --think-time"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], reason: str) -> None:
    run = subprocess.run(
        [*LOCUST, "-H", "http://127.0.0.1:9", *options], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert run.returncode != 0
    assert reason in run.stderr


def test_two_workers_add_up(tmp_path: Path) -> None:
    outcome = locust(tmp_path, "-u", "4", "-r", "4", "-t", "3s", "--processes", "2", "ShortPrompt")
    assert outcome.status == 0, outcome.text
    assert outcome.levels["all"]["requests"] == outcome.server["answers"] > 8
    assert outcome.levels["all"]["output_tokens"] == outcome.server["tokens"]
