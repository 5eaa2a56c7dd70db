"""What is true of Sluice on this GPU: does it compute the right numbers, and how fast does it serve?

    python -m loadtest.gpu_check --quick --out DIR

needs no network. It runs the equality matrix of `loadtest.equality` on the card, serves a random model of the
1B class with `sluice serve --device cuda` under load of `sluice bench`, and writes what it found to DIR/gpu_check.txt
and DIR/gpu_check.json. Exit status: 0 for all well, 1 when numbers differ or requests fail, 2 when there is no GPU.
`--dry-run` goes the same way on the CPU with tiny models.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from loadtest.architectures import ARCHITECTURES
from loadtest.checkpoint import ONE_BILLION, TINY, Size, write_checkpoint
from loadtest.equality import Outcome, run_matrix
from server import __version__
from server.bench.report import align


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is done. `budget_seconds` bounds all of it; what is cut off is reported as failed."""

    device: str
    models: tuple[str, ...]
    seeds: int
    size: Size
    load: tuple[str, ...]
    server: tuple[str, ...]
    baseline: bool
    budget_seconds: float


_LOAD = ("--concurrency=1,32,128", "--output-tokens=64", "--duration=15")
QUICK = Scope("cuda", tuple(ARCHITECTURES), 1, ONE_BILLION, _LOAD, ("--dtype=bfloat16",), False, 230.0)
FULL = Scope("cuda", tuple(ARCHITECTURES), 3, ONE_BILLION, _LOAD, ("--dtype=bfloat16",), True, 900.0)
DRY_RUN = Scope(
    "cpu",
    ("llama", "gemma2", "gpt_oss"),
    1,
    TINY,
    ("--concurrency=1,4", "--output-tokens=8", "--num-requests=6"),
    ("--kv-bytes=8MiB", "--max-num-seqs=4"),
    False,
    230.0,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and write its report."""
    options = _parser().parse_args(argv)
    scope = DRY_RUN if options.dry_run else QUICK if options.quick else FULL
    if scope.device == "cuda" and not torch.cuda.is_available():
        build = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", a build for CPUs only,")
        print(
            f"gpu_check: {build} finds no CUDA device. Run it on a machine with a GPU and a CUDA build of torch, "
            "or with --dry-run to try it on the CPU.",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + scope.budget_seconds
    report: dict[str, Any] = {"about": about(scope.device)}
    outcomes: list[Outcome] = []
    for seed in range(scope.seeds):
        outcomes += run_matrix(scope.models, scope.device, "auto", seed, _show)
    report["equality"] = [outcome.json() for outcome in outcomes]
    if scope.device == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as directory:
        _show("writing a random checkpoint")
        model = Path(directory) / "random-llama"
        parameters = write_checkpoint(model, scope.size, scope.device)
        report["served_parameters"] = parameters
        report["load"] = bench(["--model", str(model), *scope.load], scope, deadline)
        if scope.baseline:
            report["baseline"] = bench(["--model", str(model), "--baseline=32"], scope, deadline)
    report["ok"] = all(outcome.ok for outcome in outcomes) and all(
        part["status"] == 0 for name, part in report.items() if name in ("load", "baseline")
    )
    text = table(report, outcomes)
    (options.out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (options.out / "gpu_check.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "python -m loadtest.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    much = top.add_mutually_exclusive_group()
    much.add_argument("--quick", action="store_true", help="one seed and no baseline, in under 4 minutes")
    much.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models")
    top.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR", help="(default: gpu-check)")
    return top


def bench(arguments: list[str], scope: Scope, deadline: float) -> dict[str, Any]:
    """Run `sluice bench` with a server of its own: its exit status, its JSON, and its words where it failed."""
    command = [sys.executable, "-m", "server", "bench", "--json", *arguments]
    command += ["--", f"--device={scope.device}", *scope.server]
    _show("sluice bench " + " ".join(command[5:]))
    left = max(1.0, deadline - time.monotonic())
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, words = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.terminate()  # it takes its server down
            output, words = process.communicate()
            words += f"\nnot done when the {scope.budget_seconds:.0f} s of the whole check were over"
            output = ""
    return {
        "status": process.returncode,
        "command": command[2:],
        "result": json.loads(output) if output.strip() else None,
        "words": words.strip() if process.returncode else "",
    }


def about(device: str) -> dict[str, Any]:
    """When, on what and with what this ran."""
    versions = {"sluice": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions | {"transformers": transformers.__version__, "cuda": torch.version.cuda},
        "card": platform.processor() or platform.machine(),
        "driver": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["card"] = properties.name
        found["memory_bytes"] = properties.total_memory
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def table(report: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The report for people."""
    facts = report["about"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    lines = [f"{facts['date']}  {facts['card']}, driver {facts['driver']}", versions, ""]
    rows = [["model", "dtype", "error", "allowed", "", "seconds"]]
    rows += [
        [
            outcome.model,
            outcome.dtype,
            _number(outcome.error),
            _number(outcome.tolerance),
            "ok" if outcome.ok else "WRONG",
            f"{outcome.seconds:.1f}",
        ]
        for outcome in outcomes
    ]
    lines.append(align(rows))
    lines += [f"{outcome.model} in {outcome.dtype}: {outcome.note}" for outcome in outcomes if outcome.note]
    lines += ["", f"serving {report['served_parameters'] / 1e9:.2f} billion random parameters"]
    if report["load"]["result"]:
        lines.append(_load_table(report["load"]["result"]["levels"]))
    if (baseline := report.get("baseline")) and baseline["result"]:
        lines.append(f"server / bare loop at 32: {baseline['result']['baseline']['ratio']:.3f}")
    lines += [part["words"] for name in ("load", "baseline") if (part := report.get(name)) and part["words"]]
    lines += ["", "all well" if report["ok"] else "NOT WELL"]
    return "\n".join(lines)


def _load_table(levels: Sequence[dict[str, Any]]) -> str:
    rows = [["load", "requests", "failed", "tok/s out", "tok/s in", "TTFT p50 (ms)", "ITL p50 (ms)", "ITL p99 (ms)"]]
    for level in levels:
        counts = [str(level["requests"]), str(level["failures"])]
        rates = [f"{level['output_tokens_per_s']:.1f}", f"{level['input_tokens_per_s']:.1f}"]
        times = [("ttft", "p50"), ("inter_token", "p50"), ("inter_token", "p99")]
        cells = [f"{level[name][key] * 1000:.1f}" if level[name] else "-" for name, key in times]
        rows.append([level["load"], *counts, *rates, *cells])
    return align(rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
