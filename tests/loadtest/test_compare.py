"""The comparison, with fakes in place of all servers: what is started, in which order, and what is made of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, LlamaFileType

from loadtest.compare.__main__ import compare as run
from loadtest.compare.__main__ import main, parse
from loadtest.compare.peers import Peer, Spec, Wanted, build, sluice
from loadtest.compare.report import Report
from loadtest.compare.turns import Side
from server.bench.client import BenchError, Client
from server.bench.load import Run, model_of
from server.bench.record import Record
from server.bench.report import Level, summarize
from tests.bench.fake_server import serving, well_behaved

ROOT = Path(__file__).parents[2]
QUICK = ["--num-requests", "4", "--concurrency", "2", "--output-tokens", "4", "--warmup", "1", "--threads", "2"]
WANTED = Wanted(threads=2, batch=8, context=100, dtype="float32", prefix_caching=False)

Fake = Callable[..., str]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where fakes write what they were started with."""
    return tmp_path / "notes"


@pytest.fixture
def fake(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Makes the program of a peer that misbehaves as told; one that does not stands in for `sluice serve`."""

    def make(name: str, misbehaviour: str = "") -> str:
        program = tmp_path / name
        settings = f"PYTHONPATH={ROOT} FAKE_PEER_NOTE={notes} FAKE_PEER_MISBEHAVE={misbehaviour}"
        program.write_text(f'#!/bin/sh\n{settings} exec {sys.executable} -m tests.loadtest.fake_peer "$@"\n')
        program.chmod(0o755)
        return str(program)

    monkeypatch.setattr("loadtest.compare.turns.SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("server.bench.process.SERVE", (make("sluice"), "serve"))
    return make


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.add_tensor("t", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def compare(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status and what is said of each server."""
    status = main([*QUICK, "--json", *argv])
    servers = json.loads(capsys.readouterr().out)["comparison"]["servers"]
    return status, {server["name"]: server for server in servers}


def test_servers_take_turns_in_an_order_that_moves_on(
    fake: Fake, notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = ("transformers:a", fake("a")), ("transformers:b", fake("b"))
    named = [word for name, program in (a, b) for word in ("--peer", f"{name}={program}")]
    models = [word for name, _ in (a, b) for word in ("--peer-model", f"{name}=model-{name[-1]}")]
    status, servers = compare(capsys, *named, *models, "--turns", "2", "--model", "ours", "--", "--own-flag")
    assert status == 0
    starts = [line.split() for line in notes.read_text().splitlines()]
    assert [words[2] for words in starts] == ["ours", "model-a", "model-b", "model-a", "model-b", "ours"]
    assert "--own-flag" in starts[0]
    assert "--own-flag" not in starts[1]
    for words in starts:
        with pytest.raises(ProcessLookupError):
            os.kill(int(words[0]), 0)
    for server in servers.values():
        assert [turn[0]["output_tokens"] for turn in server["turns"]] == [16, 16]
    assert servers["transformers:a"]["version"] == "1.25"
    assert servers["sluice"]["summary"][0]["tok/s out"]["ratios"] == [1.0, 1.0]


def test_what_fails_does_not_stop_the_others(fake: Fake, gguf: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--peer", f"vllm={fake('v', 'dead')}", "--peer-model", "vllm=m", "--peer", "llama-server=/nowhere"]
    argv += ["--peer-model", f"llama-server={gguf}", "--peer", f"openvino={sys.executable}", "--turns", "1"]
    argv += ["--peer", f"transformers={fake('t', 'broken')}", "--peer-model", "transformers=m", "--warmup", "0"]
    status, servers = compare(capsys, *argv)
    assert status == 1
    assert servers["sluice"]["failure"] is None
    assert "the model cannot be loaded" in servers["vllm"]["failure"]
    assert "/nowhere cannot be run: No such file" in servers["llama-server"]["failure"]
    assert "--peer-model openvino=MODEL is missing" in servers["openvino"]["failure"]
    (level,) = servers["transformers"]["turns"][0]
    assert level["failure_kinds"] == {"HTTP 500: no more memory": 2}
    assert main([*QUICK, *argv]) == 1
    table = capsys.readouterr().out
    assert "FAILED, turn 1: the server did not start (exit status 1):\n  the model cannot be loaded" in table
    assert "2 requests failed: HTTP 500: no more memory" in table


def test_answers_that_end_early_are_named(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--peer", f"vllm={fake('v', 'short')}", "--peer-model", "vllm=m", "--turns", "1"]
    assert main([*QUICK, *argv]) == 0
    assert "answers are shorter than the 4 tokens asked for, 2.0 on average" in capsys.readouterr().out


def test_transformers_is_asked_in_its_own_way_to_go_on(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--peer", f"transformers={fake('t', 'endless')}", "--peer-model", "transformers=m", "--turns", "1"]
    status, servers = compare(capsys, *argv)
    assert status == 0
    assert "ignore_eos" not in servers["transformers"]["refused"]
    argv = ["--peer", f"vllm={fake('v', 'endless')}", "--peer-model", "vllm=m", "--turns", "1"]
    status, servers = compare(capsys, *argv)
    assert status == 1
    assert "stream ended without [DONE]" in servers["vllm"]["failure"]


async def test_a_server_that_runs_already_is_compared_and_left_alone(fake: Fake) -> None:
    async with serving(well_behaved) as url:
        table = (await run(*parse([*QUICK, "--turns", "1", "--peer", f"other={url}"]))).table()
        assert await model_of(Client(url)) == "fake"
    assert "runs already at http://127.0.0.1" in table
    assert "version unknown; as it was started" in table


def level(tokens: int, seconds: float, ttft: float) -> Level:
    arrivals = list(np.linspace(ttft, seconds, tokens))
    record = Record(0.0, 0.0, seconds, arrivals, [None] * tokens, 200, "length", 5, tokens)
    return summarize("1 client", Run((record,), 0.0))


def test_ratios_are_of_the_same_turn() -> None:
    ours = Side("sluice", turns=[[level(10, 1.0, 0.1)], [level(10, 2.0, 0.2)], [level(10, 1.0, 0.1)]])
    theirs = Side("other", turns=[[level(10, 2.0, 0.1)], [level(10, 2.0, 0.1)], None])
    summary = Report([ours, theirs], ["1 client"], 10).json()["servers"][1]["summary"][0]
    assert summary["tok/s out"] == {
        "median": 5.0,
        "ratio": 0.75,
        "lowest": 0.5,
        "highest": 1.0,
        "ratios": (0.5, 1.0),
    }
    assert summary["TTFT p50"]["ratios"] == pytest.approx((1.0, 0.5))
    assert summary["ITL p50"]["ratios"] == pytest.approx((1.9 / 0.9, 1.9 / 1.8))
    row = Report([ours, theirs], ["1 client"], 10).table().splitlines()[3].split()
    assert row[:4] == ["other", "5.0", "0.750", "(0.500..1.000)"]


def test_a_server_without_sluice_beside_it_has_figures_but_no_ratio() -> None:
    sides = [Side("sluice", turns=[None], failure="died"), Side("other", turns=[[level(10, 2.0, 0.1)]])]
    assert Report(sides, ["1 client"], 10).table().splitlines()[3].split()[:3] == ["other", "5.0", "-"]


def shown(peer: Peer) -> str:
    return " ".join(peer.command)


def test_commands_of_the_adapters(gguf: str, tmp_path: Path) -> None:
    ours = sluice("m", ["--kv-bytes", "1GiB"], WANTED)
    assert shown(ours).endswith(
        "serve m --dtype float32 --max-num-seqs 8 --max-model-len 100 --no-enable-prefix-caching --kv-bytes 1GiB"
    )
    assert ours.environment == {"OMP_NUM_THREADS": "2"}
    llama = build(Spec("llama-server:q4", "/x/llama-server", gguf, ("--mlock",)), WANTED)
    assert shown(llama) == (
        f"/x/llama-server --model {gguf} --threads 2 --threads-batch 2 --parallel 8 --ctx-size 800 "
        "--cache-type-k f32 --cache-type-v f32 --no-cache-prompt --mlock"
    )
    assert llama.numbers == "Q4_1 weights, f32 cache"
    vllm = build(Spec("vllm", "/x/vllm", "m"), WANTED)
    assert shown(vllm) == (
        "/x/vllm serve m --dtype float32 --max-num-seqs 8 --max-model-len 100 --no-enable-prefix-caching"
    )
    assert vllm.environment == {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    transformers = build(Spec("transformers", "/x/transformers", "m"), WANTED)
    assert shown(transformers) == (
        "/x/transformers serve m --dtype float32 --continuous-batching --cb-block-size 32 --cb-num-blocks 32"
    )
    constant = '<data element_type="{}" shape="9" offset="0" size="{}" />'
    xml = constant.format("i64", 8) + constant.format("f16", 5000) + constant.format("f32", 400)
    (tmp_path / "openvino_model.xml").write_text(xml)
    openvino = build(Spec("openvino", "/x/python", str(tmp_path)), WANTED)
    assert shown(openvino).endswith(
        f"openvino_server.py --model {tmp_path} --threads 2 --precision f32 --max-num-seqs 8 --kv-blocks 32"
    )
    assert openvino.numbers == "f16 weights, f32 arithmetic and cache"
    assert "shim" in openvino.note


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("no such thing")
    with pytest.raises(BenchError, match="is no GGUF file"):
        build(Spec("llama-server", "/x/llama-server", str(tmp_path / "model.gguf")), WANTED)
    with pytest.raises(BenchError, match=r"openvino_model\.xml: No such file"):
        build(Spec("openvino", "/x/python", str(tmp_path)), WANTED)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "--peer is missing"),
        (["--peer", "vllm"], "is not NAME=VALUE"),
        (["--peer", "ollama=/x"], "not one of llama-server, vllm, transformers, openvino"),
        (["--peer", "vllm=/x", "--peer", "vllm=/y"], "a name of its own"),
        (["--peer", "sluice=http://x"], "a name of its own"),
        (["--peer", "a=http://x", "--peer-model", "a=m"], "leave out its --peer-model"),
        (["--peer", "a=http://x", "--peer-args", "b=m"], "no --peer is named b"),
        (["--peer", "a=http://x", "--concurrency", "0"], "must be above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err
