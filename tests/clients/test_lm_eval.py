"""lm-eval over HTTP scores what its own Hugging Face model scores on the same weights.

`local-completions` sends token ids with echo and logprobs and takes `token_logprobs[len(context):-1]`, so a list that
is off by one or a score that was tempered shows up at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import KEY, Served

TASKS = Path(__file__).parent / "lm_eval"
CLOSE = 1e-3

pytestmark = pytest.mark.embedded


@dataclass
class Scores:
    """`metrics` by task and name; `answers` by task, document and request: a text or (log-likelihood, is greedy)."""

    metrics: dict[tuple[str, str], float]
    answers: dict[tuple[str, int], list[Any]]


def evaluate(kind: str, arguments: dict[str, Any], directory: Path) -> Scores:
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        kind,
        "--log_samples",
        "--output_path",
        str(directory),
    ]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", ".", "--tasks", "sluice_capitals", "sluice_endings", "sluice_arithmetic"]
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HOME": str(directory / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics: dict[tuple[str, str], float] = {}
    [report] = directory.rglob("results_*.json")
    for task, values in json.loads(report.read_text())["results"].items():
        for name, value in values.items():
            if isinstance(value, float) and "_stderr" not in name:
                metrics[task, name] = value
    answers: dict[tuple[str, int], list[Any]] = {}
    for log in directory.rglob("samples_*.jsonl"):
        task = log.name.removeprefix("samples_").rsplit("_", 1)[0]
        for line in log.read_text().splitlines():
            sample = json.loads(line)
            answers[task, sample["doc_id"]] = [one[0] for one in sample["resps"]]
    return Scores(metrics, answers)


@pytest.fixture(scope="module")
def theirs(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Scores:
    arguments = {"pretrained": embedded_path, "dtype": "float32", "max_length": 2047}
    return evaluate("hf", arguments, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def ours(served: Served, embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Scores:
    arguments = {
        "model": served.model,
        "base_url": f"{served.api}/completions",
        "tokenizer": embedded_path,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 2048,
    }
    return evaluate("local-completions", arguments, tmp_path_factory.mktemp("ours"))


def test_the_metrics_are_equal(ours: Scores, theirs: Scores) -> None:
    assert {name.partition(",")[0] for _, name in theirs.metrics} == {"acc", "acc_norm", "perplexity", "exact_match"}
    assert ours.metrics == pytest.approx(theirs.metrics, abs=CLOSE)
    assert all(value > 0 for value in theirs.metrics.values()), "a score of 0 compares nothing"


def test_every_loglikelihood_is_equal(ours: Scores, theirs: Scores) -> None:
    compared = 0
    for key, their_answers in theirs.answers.items():
        if key[0] == "sluice_arithmetic":
            continue
        for (our_score, our_greedy), (their_score, their_greedy) in zip(ours.answers[key], their_answers, strict=True):
            assert float(our_score) == pytest.approx(float(their_score), abs=CLOSE)
            assert our_greedy == their_greedy
            compared += 1
    assert compared == 37


def test_every_generation_is_equal(ours: Scores, theirs: Scores) -> None:
    generated = {key: texts for key, texts in theirs.answers.items() if key[0] == "sluice_arithmetic"}
    assert len(generated) == 6
    assert {key: ours.answers[key] for key in generated} == generated
