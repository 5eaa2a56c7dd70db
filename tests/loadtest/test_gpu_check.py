"""The whole script on the CPU: equality, a served random model under load, report and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from loadtest.cache_times import Timing
from loadtest.checkpoint import ONE_BILLION, TINY, build_tokenizer, write_checkpoint
from loadtest.equality import Outcome
from loadtest.gpu_check import ON_CPU, about, bench, main, serve, table
from server.kvpool.layout import AttentionKind, LayerLayout


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "loadtest.gpu_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=285, env=environment)


@pytest.mark.timeout(295)
def test_on_the_cpu_it_checks_measures_serves_and_reports(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert report["ok"] is True
    assert [entry["model"] for entry in report["equality"]] == [name for name in ON_CPU.models for _ in range(2)]
    assert all(0 < entry["error"] <= entry["tolerance"] for entry in report["equality"])
    assert [entry["cache"] for entry in report["equality"]] == ["3 tables"] * 2 + ["latent"] * 2
    assert len(report["cache"]) == 31
    assert all(timing["milliseconds"] > 0 and timing["moved_bytes"] > 0 for timing in report["times"])
    (kept,) = report["kept_load"]["result"]["levels"]
    assert (kept["requests"], kept["failures"], kept["output_tokens"]) == (6, 0, 48)
    levels = report["load"]["result"]["levels"]
    assert [(level["requests"], level["failures"], level["output_tokens"]) for level in levels] == [(6, 0, 48)] * 2
    assert all(level["ttft"]["count"] == 6 for level in levels)  # every id has text, so every stream shows some
    assert report["about"]["versions"]["torch"] == torch.__version__
    text = (tmp_path / "out" / "gpu_check.txt").read_text()
    assert text == done.stdout
    assert text.rstrip().endswith("all well")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--out", str(tmp_path / "out")]) == 2
    words = capsys.readouterr().err
    assert "finds no CUDA device" in words
    assert "--device cpu" in words
    assert not (tmp_path / "out").exists()


def test_wrong_numbers_and_failed_loads_show_in_the_table() -> None:
    outcomes = [
        Outcome("llama", "float32", 1e-6, 1e-4, True, 0.1),
        Outcome("opt", "float32", float("nan"), 1e-4, False, 0.1),
        Outcome("gpt2", "bfloat16", None, None, False, 0.1, "RuntimeError: no kernel image"),
    ]
    failed = {"status": 1, "result": None, "words": "the server died"}
    kept = [Outcome("host copies", "int8", 12.0, 0.0, False, 0.1, "the host's memory is not pinned")]
    timings = [Timing("a step", 2.0, 4_000_000), Timing("a copy", None, note="RuntimeError: out of memory")]
    report = {"about": about("cpu"), "served_parameters": 10**9, "load": failed, "kept_load": failed, "ok": False}
    text = table(report, outcomes, kept, timings)
    rows = [line.split() for line in text.splitlines()]
    assert ["llama", "float32", "1.0e-06", "1.0e-04", "ok", "0.1"] in rows
    assert ["opt", "float32", "nan", "1.0e-04", "WRONG", "0.1"] in rows
    assert "gpt2, bfloat16: RuntimeError: no kernel image" in text
    assert ["host", "copies", "int8", "1.2e+01", "0.0e+00", "WRONG", "0.1"] in rows
    assert "host copies, int8: the host's memory is not pinned" in text
    assert ["a", "step", "2.000", "2.0"] in rows
    assert ["a", "copy", "-", "-"] in rows
    assert "a copy: RuntimeError: out of memory" in text
    assert text.endswith("the server died\nthe server died\n\nNOT WELL")


def test_a_checkpoint_that_cannot_be_written_leaves_the_rest_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> int:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("loadtest.gpu_check.write_checkpoint", explode)
    found = serve(ON_CPU, time.monotonic() + 100)
    assert found == {"load": {"status": 1, "result": None, "words": "RuntimeError: out of memory"}}
    assert "RuntimeError: out of memory" in table({"about": about("cpu"), **found, "ok": False}, [], [], [])


def test_a_load_that_takes_too_long_is_stopped_and_says_so(tmp_path: Path) -> None:
    """The budget is over before the server can be up."""
    part = bench(["--model", str(tmp_path)], (), ON_CPU, time.monotonic())
    assert part["status"] != 0
    assert part["result"] is None
    assert "not done when the 260 s" in part["words"]


def test_the_checkpoint_is_whole(tmp_path: Path) -> None:
    parameters = write_checkpoint(tmp_path, TINY, "cpu")
    config = AutoConfig.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert config.vocab_size == len(tokenizer) == TINY.vocab
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) > 2 * parameters


def test_every_id_of_the_tokenizer_is_text() -> None:
    tokenizer = build_tokenizer(2000)
    text = "def f(x):\n    return x  # größer, 早上好 🌊"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 2000
    assert all(tokenizer.decode([token]) for token in range(2000))
    assert len({tokenizer.decode([token]) for token in range(260, 1999)}) == 1739


def test_the_served_model_is_of_the_1b_class() -> None:
    size = ONE_BILLION
    head_dim = size.hidden // size.heads
    attention = 2 * size.hidden * size.hidden + 2 * size.hidden * size.kv_heads * head_dim
    total = size.layers * (attention + 3 * size.hidden * size.intermediate) + 2 * size.vocab * size.hidden
    assert 0.9e9 < total < 1.5e9
    layer = LayerLayout(AttentionKind.GQA, size.kv_heads, head_dim, head_dim)
    assert size.layers * layer.elements_per_token * 2 == 32768
