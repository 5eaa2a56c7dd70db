"""What is true of Sluice on this GPU: does it compute the right numbers, and how fast does it serve?

    python -m loadtest.gpu_check --quick --out DIR

needs no network and takes less than six minutes. On the card it

* runs the equality matrix of `loadtest.equality`, in which models with latents are served from these and models with
  windows with several block tables, and the checks of `loadtest.cache_check`: quantised caches, compactions and copies
  to host memory against the same on the CPU;
* measures decode steps by the kind of cache, compactions and copies (`loadtest.cache_times`);
* serves a random model of the 1B class with `sluice serve --device cuda` under load of `sluice bench`: once as it is,
  and once with a cache of int8, budgets and host memory.

What it found is written to DIR/gpu_check.txt and DIR/gpu_check.json. Each part that fails is reported and the others go
on. Exit status: 0 for all well, 1 when numbers differ or a part fails, 2 when there is no GPU. `--device cpu` goes the
same way on the CPU with tiny models.
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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from loadtest.architectures import ARCHITECTURES
from loadtest.cache_check import run_cache_checks
from loadtest.cache_times import Timing, Work, run_timings
from loadtest.checkpoint import ONE_BILLION, TINY, Size, write_checkpoint
from loadtest.equality import Outcome, run_matrix
from server import __version__
from server.bench.report import align


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is done. `budget_seconds` bounds all of it; what is cut off is reported as failed.

    load, server: of `sluice bench` and of the server it starts. kept_load, kept_server: the same for the server with
    the cache of int8, what it has beside `server`.
    """

    device: str
    models: tuple[str, ...]
    seeds: int
    size: Size
    work: Work
    load: tuple[str, ...]
    server: tuple[str, ...]
    kept_load: tuple[str, ...]
    kept_server: tuple[str, ...]
    baseline: bool
    budget_seconds: float


_WORK = Work(batches=((1, 2048), (32, 2048)), compacted=8192, copied_bytes=2**28, seconds=0.5)
_LOAD = ("--concurrency=1,32,128", "--output-tokens=64", "--duration=15")
_KEPT_LOAD = ("--concurrency=32", "--output-tokens=64", "--duration=8")
_KEPT = ("--kv-cache-dtype=int8", "--kv-policy=h2o", "--kv-budget=64")
QUICK = Scope(
    device="cuda",
    models=tuple(ARCHITECTURES),
    seeds=1,
    size=ONE_BILLION,
    work=_WORK,
    load=_LOAD,
    server=("--dtype=bfloat16",),
    kept_load=_KEPT_LOAD,
    kept_server=(*_KEPT, "--kv-host-memory=1GiB"),
    baseline=False,
    budget_seconds=340.0,
)
FULL = replace(QUICK, seeds=3, baseline=True, budget_seconds=1000.0)
ON_CPU = Scope(
    device="cpu",
    models=("gemma2", "deepseek_v3"),
    seeds=1,
    size=TINY,
    work=Work(batches=((1, 64), (4, 64)), compacted=128, copied_bytes=2**20, seconds=0.02),
    load=("--concurrency=1,4", "--output-tokens=8", "--num-requests=6"),
    server=("--kv-bytes=8MiB", "--max-num-seqs=4"),
    kept_load=("--concurrency=4", "--output-tokens=8", "--num-requests=6"),
    kept_server=(*_KEPT, "--kv-host-memory=1MiB"),
    baseline=False,
    budget_seconds=260.0,
)
_SERVED = ("load", "kept_load", "baseline")
"""Parts of the report that come from `sluice bench`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and write its report."""
    options = _parser().parse_args(argv)
    scope = ON_CPU if options.device == "cpu" else QUICK if options.quick else FULL
    if scope.device == "cuda" and not torch.cuda.is_available():
        build = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", a build for CPUs only,")
        print(
            f"gpu_check: {build} finds no CUDA device. Run it on a machine with a GPU and a CUDA build of torch, "
            "or with --device cpu to try it on the CPU.",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + scope.budget_seconds
    report: dict[str, Any] = {"about": about(scope.device)}
    outcomes: list[Outcome] = []
    for seed in range(scope.seeds):
        outcomes += run_matrix(scope.models, scope.device, "auto", seed, deadline, _show)
    report["equality"] = [outcome.json() for outcome in outcomes]
    kept: list[Outcome] = []
    for seed in range(scope.seeds):
        kept += run_cache_checks(scope.device, seed, deadline, _show)
    report["cache"] = [outcome.json() for outcome in kept]
    timings = run_timings(scope.size, scope.work, scope.device, deadline, _show)
    report["times"] = [timing.json() for timing in timings]
    if scope.device == "cuda":
        torch.cuda.empty_cache()
    report |= serve(scope, deadline)
    report["ok"] = (
        all(outcome.ok for outcome in (*outcomes, *kept))
        and all(timing.milliseconds is not None for timing in timings)
        and all(report[name]["status"] == 0 for name in _SERVED if name in report)
    )
    text = table(report, outcomes, kept, timings)
    (options.out / "gpu_check.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (options.out / "gpu_check.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report["ok"] else 1


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "python -m loadtest.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--quick", action="store_true", help="one seed and no baseline, in under 6 minutes")
    top.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="(default: cuda); on the CPU with tiny models and always quick, to try the script",
    )
    top.add_argument("--out", type=Path, default=Path("gpu-check"), metavar="DIR", help="(default: gpu-check)")
    return top


def serve(scope: Scope, deadline: float) -> dict[str, Any]:
    """A random model under load, in all the ways of the scope: parts of the report."""
    with tempfile.TemporaryDirectory() as directory:
        _show("writing a random checkpoint")
        model = Path(directory) / "random-llama"
        try:
            found: dict[str, Any] = {"served_parameters": write_checkpoint(model, scope.size, scope.device)}
        except Exception as failure:  # of the device: what was found before is reported all the same
            return {"load": {"status": 1, "result": None, "words": f"{type(failure).__name__}: {failure}"}}
        if scope.device == "cuda":
            torch.cuda.empty_cache()
        found["load"] = bench(["--model", str(model), *scope.load], scope.server, scope, deadline)
        kept_server = (*scope.server, *scope.kept_server)
        found["kept_load"] = bench(["--model", str(model), *scope.kept_load], kept_server, scope, deadline)
        if scope.baseline:
            found["baseline"] = bench(["--model", str(model), "--baseline=32"], scope.server, scope, deadline)
    return found


def bench(arguments: list[str], server: Sequence[str], scope: Scope, deadline: float) -> dict[str, Any]:
    """Run `sluice bench` with a server of its own: its exit status, its JSON, and its words where it failed."""
    command = [sys.executable, "-m", "server", "bench", "--json", *arguments]
    command += ["--", f"--device={scope.device}", *server]
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


def table(
    report: dict[str, Any], outcomes: Sequence[Outcome], kept: Sequence[Outcome], timings: Sequence[Timing]
) -> str:
    """The report for people."""
    facts = report["about"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    lines = [f"{facts['date']}  {facts['card']}, driver {facts['driver']}", versions, ""]
    lines += [*_outcome_table(["model", "dtype"], outcomes), ""]
    lines += [*_outcome_table(["what", "cache"], kept), ""]
    rows = [["step, compaction or copy", "ms", "GB/s of the cache"]]
    rows += [[each.what, _decimal(each.milliseconds, 3), _decimal(each.gigabytes_per_second, 1)] for each in timings]
    lines.append(align(rows))
    lines += [f"{each.what}: {each.note}" for each in timings if each.note]
    if "served_parameters" in report:
        lines += ["", f"serving {report['served_parameters'] / 1e9:.2f} billion random parameters"]
    for name, title in (("load", ""), ("kept_load", "with a cache of int8, a budget for each request, host memory")):
        if (part := report.get(name)) and part["result"]:
            lines += [title] * bool(title) + [_load_table(part["result"]["levels"])]
    if (baseline := report.get("baseline")) and baseline["result"]:
        lines.append(f"server / bare loop at 32: {baseline['result']['baseline']['ratio']:.3f}")
    lines += [part["words"] for name in _SERVED if (part := report.get(name)) and part["words"]]
    lines += ["", "all well" if report["ok"] else "NOT WELL"]
    return "\n".join(lines)


def _outcome_table(titles: list[str], outcomes: Sequence[Outcome]) -> list[str]:
    rows = [[*titles, "error", "allowed", "", "seconds", "served"]]
    rows += [
        [
            outcome.model,
            outcome.dtype,
            _number(outcome.error),
            _number(outcome.tolerance),
            "ok" if outcome.ok else "WRONG",
            f"{outcome.seconds:.1f}",
            outcome.cache,
        ]
        for outcome in outcomes
    ]
    notes = [f"{outcome.model}, {outcome.dtype}: {outcome.note}" for outcome in outcomes if outcome.note]
    return [align(rows), *notes]


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


def _decimal(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
