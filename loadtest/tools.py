"""The load tools that are held against each other: how each is told the same load, and what its report says."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Task:
    """A closed loop: `concurrency` clients that send their next request when the last one has ended.

    prompts: a file of as many prompts as requests, each of `prompt_tokens`, for the tools that take one; the others
        make prompts of that many tokens with `tokenizer`, by `seed`.
    tokenizer: a directory of Hugging Face files.
    """

    url: str
    model: str
    chat: bool
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int
    prompts: Path
    tokenizer: Path | None


@dataclass(frozen=True, slots=True)
class Figures:
    """What a tool reports. Times in seconds; `tokens_per_s` is of output tokens."""

    requests: int
    tokens_per_s: float
    ttft_mean: float
    ttft_p50: float
    inter_token_mean: float


class ReportError(Exception):
    """A tool's report is not what was expected; the message says how."""


class Tool(ABC):
    """definition: what its tokens/s and inter-token latency mean, where that differs from the others."""

    name: str
    definition: str
    needs_tokenizer = False

    @abstractmethod
    def command(self, task: Task, folder: Path) -> Sequence[str]:
        """Runs the load and leaves the report in the folder, or on standard output."""

    @abstractmethod
    def figures(self, folder: Path, output: bytes) -> Figures:
        """Read the report. Raises ReportError, OSError, ValueError or LookupError where it is not what was expected."""

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)


class SluiceBench(Tool):
    name = "sluice bench"
    definition = (
        "tokens of usage from the first request sent to the last stream ended; ITL over all tokens; one more request "
        "of one token before the load, which the server counts"
    )

    def command(self, task: Task, folder: Path) -> Sequence[str]:
        load = [f"--concurrency={task.concurrency}", f"--num-requests={task.requests}", "--warmup=0", "--temperature=0"]
        work = [f"--prompts={task.prompts}", "--verbatim", f"--output-tokens={task.output_tokens}", "--json"]
        target = [f"--url={task.url}", f"--model={task.model}", *(["--chat"] if task.chat else [])]
        return [sys.executable, "-m", "server", "bench", *target, *load, *work]

    def figures(self, folder: Path, output: bytes) -> Figures:
        return _of_level(json.loads(output)["levels"][0])


class Locust(Tool):
    name = "locust"
    definition = "as sluice bench, by the same reader of streams; connections are kept"

    def command(self, task: Task, folder: Path) -> Sequence[str]:
        users = ["-u", str(task.concurrency), "-r", str(task.concurrency), "--requests", str(task.requests)]
        work = [
            "--prompts",
            str(task.prompts),
            "--verbatim",
            "--output-tokens",
            str(task.output_tokens),
            "--ignore-eos",
        ]
        target = ["-H", task.url, "--model", task.model, *(["--chat"] if task.chat else [])]
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"), "--headless"]
        summary = ["--only-summary", "--summary", str(folder / "report.json")]
        return [*command, *target, *users, *work, *summary, "ShortPrompt"]

    def figures(self, folder: Path, output: bytes) -> Figures:
        return _of_level(json.loads((folder / "report.json").read_text())["levels"][0])


class GuideLLM(Tool):
    name = "guidellm"
    definition = (
        "tokens of usage from the start of its scheduler to its end; ITL of a request is last less first token over "
        "the tokens after the first"
    )
    needs_tokenizer = True

    def __init__(self, program: str) -> None:
        self.program = program

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

    def command(self, task: Task, folder: Path) -> Sequence[str]:
        path = "/v1/chat/completions" if task.chat else "/v1/completions"
        backend = f"kind=openai_http,target={task.url},model={task.model},request_format={path}"
        data = f"kind=synthetic_text,prompt_tokens={task.prompt_tokens},output_tokens={task.output_tokens}"
        return [
            *(self.program, "run", "--disable-console-interactive"),
            *("--backend", f"{backend},extras.body.temperature=0"),
            *("--profile", f"kind=concurrent,streams={task.concurrency}"),
            *("--constraint", f"kind=max_requests,count={task.requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={task.tokenizer}"),
            *("--data", data, "--seed", f"kind=static,value={task.seed}"),
            *("--output", f"kind=json,path={folder / 'report.json'}"),
        ]

    def figures(self, folder: Path, output: bytes) -> Figures:
        metrics = json.loads((folder / "report.json").read_text())["benchmarks"][0]["metrics"]
        totals = metrics["request_totals"]
        if totals["errored"] or totals["incomplete"]:
            raise ReportError(f"{totals['errored']} requests failed, {totals['incomplete']} did not end")

        def of(name: str) -> Mapping[str, Any]:
            return dict(metrics[name]["successful"])

        return Figures(
            totals["successful"],
            of("output_tokens_per_second")["mean"],
            of("time_to_first_token_ms")["mean"] / 1000,
            of("time_to_first_token_ms")["median"] / 1000,
            of("inter_token_latency_ms")["mean"] / 1000,
        )


class AIPerf(Tool):
    name = "aiperf"
    definition = (
        "tokens of usage from the first request sent to the last response; ITL of a request is its whole latency less "
        "TTFT over the tokens after the first, then the mean over requests"
    )
    needs_tokenizer = True

    def __init__(self, program: str) -> None:
        self.program = program

    @property
    def environment(self) -> dict[str, str]:
        """It takes a directory for a name on the hub where the hub is said to be offline."""
        return {
            name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        }

    def command(self, task: Task, folder: Path) -> Sequence[str]:
        return [
            *(self.program, "profile", "--model", task.model, "--url", task.url, "--streaming"),
            *("--endpoint-type", "chat" if task.chat else "completions", "--tokenizer", str(task.tokenizer)),
            *("--concurrency", str(task.concurrency), "--request-count", str(task.requests)),
            *("--num-dataset-entries", str(task.requests), "--random-seed", str(task.seed)),
            *("--synthetic-input-tokens-mean", str(task.prompt_tokens), "--synthetic-input-tokens-stddev", "0"),
            *("--output-tokens-mean", str(task.output_tokens), "--output-tokens-stddev", "0"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count"),
            *("--no-server-metrics", "--no-gpu-telemetry", "--ui", "none", "--artifact-dir", str(folder)),
        ]

    def figures(self, folder: Path, output: bytes) -> Figures:
        report = json.loads((folder / "profile_export_aiperf.json").read_text())
        if report["error_summary"]:
            raise ReportError(f"requests failed: {report['error_summary']}")
        return Figures(
            int(report["request_count"]["avg"]),
            report["output_token_throughput"]["avg"],
            report["time_to_first_token"]["avg"] / 1000,
            report["time_to_first_token"]["p50"] / 1000,
            report["inter_token_latency"]["avg"] / 1000,
        )


def _of_level(level: Mapping[str, Any]) -> Figures:
    if level["failures"]:
        raise ReportError(f"{level['failures']} requests failed: {next(iter(level['failure_kinds']))}")
    ttft = level["ttft"]
    tokens_per_s, inter_token = level["output_tokens_per_s"], level["inter_token"]["mean"]
    return Figures(level["requests"], tokens_per_s, ttft["mean"], ttft["p50"], inter_token)
