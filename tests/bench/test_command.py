"""The command from arguments to output, with the fake server in place of `sluice serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from server.bench import main
from server.bench.lengths import OUTPUT_TOKENS, PROMPT_TOKENS, lognormal
from server.bench.options import parse

FAKE = (sys.executable, "-m", "tests.bench.fake_server")
QUICK = ["--num-requests", "4", "--output-tokens", "3", "--warmup", "1"]


@pytest.fixture(autouse=True)
def fake_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.bench.process.SERVE", FAKE)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_own_server_is_measured_and_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = tmp_path / "pid"
    assert main([*QUICK, "--concurrency", "1,2", "--json", "--model", "some-model", "--", "--note", str(note)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [level["load"] for level in result["levels"]] == ["1 client", "2 clients"]
    assert [level["requests"] for level in result["levels"]] == [4, 4]
    assert [level["output_tokens"] for level in result["levels"]] == [12, 12]
    assert result["server_flags"] == ["some-model", "--note", str(note)]
    assert not {"api_key", "input_tokens"} & result["options"].keys(), "what is secret, or played no part"
    assert "output_tokens" in result["options"]
    assert gone(int(note.read_text()))


def test_table_of_an_open_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--rate", "200"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["200", "requests/s", "4", "0"]


def test_what_the_server_refuses_is_part_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK, "--concurrency", "1"]
    assert main([*options, "--", "--plain"]) == 0
    refused = ["ignore_eos", "stream_options.continuous_usage_stats"]
    assert f"The server refuses {', '.join(refused)}" in capsys.readouterr().out
    assert main([*options, "--json", "--", "--plain"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == refused


def test_prefix_cache_comparison_runs_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*QUICK, "--concurrency", "1", "--turns", "2", "--shared-prefix", "100", "--json"]
    assert main(["--compare-prefix-cache", *options]) == 0
    result = json.loads(capsys.readouterr().out)["prefix_cache"]
    assert result["prefix_tokens"] == 100
    assert len(result["levels"]["on"][0]) == len(result["levels"]["off"][0]) == 2
    assert min(level["input_tokens"] for level in result["levels"]["on"][0]) >= 4 * 99
    assert result["summary"][0]["ratio"] > 0


def test_constrained_comparison_runs_both_sides_on_one_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compare-constrained", *QUICK, "--concurrency", "2", "--turns", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["constrained"]
    assert len(result["levels"]["half"][0]) == len(result["levels"]["free"][0]) == 2
    assert result["summary"][0]["ratio"] > 0
    assert result["schema"]["type"] == "array"


def test_what_of_the_cache_is_empty_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.bench.fragmentation.POLL_SECONDS", 0.001)
    assert main([*QUICK, "--concurrency", "1"]) == 0
    words = "1 client: fragmentation of the server's KV cache 3.1% on average, at most 3.1%"
    assert words in capsys.readouterr().out


def test_mixed_lengths_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lengths", "mixed", "--concurrency", "32", "--num-requests", "64", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "output_tokens" not in result["options"], "lengths are drawn, whatever the default is"
    (level,) = result["levels"]
    assert level["output_tokens"] == sum(lognormal(OUTPUT_TOKENS))
    assert level["input_tokens"] / 64 == pytest.approx(PROMPT_TOKENS, rel=0.15)


def test_a_server_that_cannot_start_shows_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--", "--die"]) == 1
    assert "the model cannot be loaded" in capsys.readouterr().err


def test_a_server_that_dies_under_load_shows_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--", "--crash"]) == 1
    words = capsys.readouterr().err
    assert "the server died (exit status 3)" in words
    assert "out of memory" in words


def test_failures_make_the_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--model", "m"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_a_terminated_benchmark_takes_its_server_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import sys, server.bench.process as p, server.bench; "
        f"p.SERVE = {FAKE!r}; sys.exit(server.bench.main(sys.argv[1:]))"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", code, "--duration", "600", "--concurrency", "1", "--", "--note", str(note)],
        stderr=subprocess.PIPE,
    )
    while not (note.exists() and note.read_text()) and bench.poll() is None:
        time.sleep(0.02)
    bench.send_signal(signal.SIGTERM)
    assert b"stopped" in bench.communicate(timeout=60)[1]
    assert bench.returncode == 130
    assert gone(int(note.read_text()))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--url", "http://x", "--", "--dtype", "bfloat16"], "leave out --url"),
        (["--url", "http://x", "--baseline"], "leave out --url"),
        (["--baseline", "--rate", "2"], "leave out --rate"),
        (["--baseline", "--shared-prefix", "9"], "leave out --shared-prefix"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--concurrency", "0"], "must be above 0"),
        (["--rate", "inf"], "must be above 0"),
        (["--concurrency", "1,x"], "list of whole numbers"),
        (["--warmup", "-1"], "at least 0"),
        (["--seed", "-1"], "at least 0"),
        (["--temperature", "nan"], "at least 0"),
        (["--baseline", "--temperature", "1", "--verbatim"], "leave out --verbatim, --temperature"),
        (["--baseline", "--lengths", "mixed"], "leave out --lengths"),
        (["--lengths", "mixed", "--output-tokens", "9"], "leave out --output-tokens"),
        (["--lengths", "long"], "invalid choice"),
        (["--input-tokens", "9"], "--input-tokens is for --baseline"),
        (["--turns", "9"], "--turns is for"),
        (["--", "--port=1"], "chooses --host and --port"),
        (["positional"], "unrecognized"),
    ],
)
def test_options_that_do_not_fit_are_refused(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "sluice bench --baseline" in capsys.readouterr().out


def test_defaults_of_modes() -> None:
    assert parse(["--compare-prefix-cache"])[0].shared_prefix == 512
    assert parse(["--baseline"])[0].baseline == 32
    assert parse([])[0].output_tokens == parse(["--baseline"])[0].output_tokens == 64
    assert parse(["--model", "m", "--", "--dtype", "float32"])[1] == ["m", "--dtype", "float32"]
