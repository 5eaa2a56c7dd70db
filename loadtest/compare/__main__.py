"""Sluice beside other servers on one workload, in turns.

    python -m loadtest.compare --model DIR \\
        --peer transformers=/path/to/venv/bin/transformers --peer-model transformers=DIR \\
        --peer llama-server=/path/to/llama-server --peer-model llama-server=model-f32.gguf \\
        --peer openvino=/path/to/venv/bin/python --peer-model openvino=EXPORTED_DIR \\
        --peer vllm=/path/to/venv/bin/vllm --peer-model vllm=DIR \\
        --peer other=http://host:8000 -- --kv-bytes 1GiB

Each server is started, warmed up, measured and ended, one at a time, so often as there are turns; the order moves on
by one each turn. What they are and how they were started stands under the numbers. Nothing is installed: a peer is the
program that you name. KIND:LABEL=PROGRAM gives a kind a second time; what follows -- goes to `sluice serve`.
Exit status: 0, or 1 if a server could not be measured or a request failed, which does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.compare import peers
from loadtest.compare.peers import ADAPTERS, Peer, Spec, Wanted
from loadtest.compare.report import Report
from loadtest.compare.turns import Side, Work, take_turns
from server.bench.client import BenchError
from server.bench.options import API_KEY_VARIABLE
from server.bench.process import run_until_told
from server.bench.progress import ProgressLine
from server.bench.workload import load_prompts


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _listed(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    top = argparse.ArgumentParser(
        "python -m loadtest.compare",
        usage="python -m loadtest.compare [options] [-- options of sluice serve]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    servers = top.add_argument_group("servers")
    servers.add_argument("--model", help="what Sluice serves (default: the embedded model)")
    servers.add_argument(
        "--peer",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=PROGRAM",
        help=f"another server: {', '.join(ADAPTERS)}; or NAME=URL for any that runs already",
    )
    servers.add_argument("--peer-model", type=_named, action="append", default=[], metavar="NAME=MODEL")
    servers.add_argument(
        "--peer-args", type=_named, action="append", default=[], metavar="NAME=ARGS", help="added to its command line"
    )
    servers.add_argument(
        "--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"for those at a URL (default: {API_KEY_VARIABLE})"
    )
    alike = top.add_argument_group("alike for all that are started")
    alike.add_argument("--threads", type=_positive, metavar="N", help="(default: the CPUs we may use)")
    alike.add_argument("--max-batch", type=_positive, metavar="N", help="(default: the most clients)")
    alike.add_argument("--context", type=_positive, default=2048, metavar="TOKENS", help="of a request (default: 2048)")
    alike.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(%(default)s)")
    alike.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    work = top.add_argument_group("work, as in sluice bench")
    work.add_argument("--concurrency", type=_listed, default=[8], metavar="N,N,...", help="clients (default: 8)")
    work.add_argument(
        "--num-requests", type=_positive, metavar="N", help="of each load (default: 3 a client, at least 8)"
    )
    work.add_argument("--output-tokens", type=_positive, default=64, metavar="N", help="of each answer (default: 64)")
    work.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before (default: 2)")
    work.add_argument("--prompts", type=Path, metavar="FILE")
    work.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts' order (default: 0)")
    work.add_argument("--timeout", type=_positive, default=600, metavar="S", help="of a request (default: 600)")
    work.add_argument("--turns", type=_positive, default=3, metavar="N", help="of each server (default: 3)")
    top.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return top


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Spec], list[str]]:
    """Options, peers, and Sluice's own options after `--`. Exits with status 2 where they do not fit."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    top = parser()
    options = top.parse_args(argv[:split])
    if not options.peer:
        top.error("--peer is missing: there is nothing to compare with")
    names = [name for name, _ in options.peer]
    if len(set(names)) < len(names) or "sluice" in names:
        top.error("each --peer needs a name of its own, other than sluice: KIND:LABEL=PROGRAM")
    models, arguments = dict(options.peer_model), dict(options.peer_args)
    if strange := [name for name in (*models, *arguments) if name not in names]:
        top.error(f"no --peer is named {strange[0]}")
    specs = [
        Spec(name, target, models.get(name), tuple(shlex.split(arguments.get(name, ""))))
        for name, target in options.peer
    ]
    for spec in specs:
        if spec.is_url and (spec.model or spec.arguments):
            top.error(f"{spec.name} runs already: leave out its --peer-model and --peer-args")
        if not spec.is_url and spec.kind not in ADAPTERS:
            top.error(f"--peer {spec.name}: not one of {', '.join(ADAPTERS)}, and no URL")
    return options, specs, argv[split + 1 :]


async def compare(options: argparse.Namespace, specs: Sequence[Spec], flags: Sequence[str]) -> Report:
    """Measure all servers."""
    wanted = Wanted(
        options.threads or len(os.sched_getaffinity(0)),
        options.max_batch or max(options.concurrency),
        options.context,
        options.dtype,
        options.prefix_caching,
    )
    work = Work(
        load_prompts(options.prompts),
        options.concurrency,
        options.num_requests,
        options.output_tokens,
        options.warmup,
        options.seed,
        secrets.token_hex(2),
        options.timeout,
        options.api_key,
    )
    progress = ProgressLine()

    def show(text: str) -> None:
        progress.show(text, milestone=True)

    sides = [await _side("sluice", partial(peers.sluice, options.model, flags, wanted))]
    sides += [await _side(spec.name, partial(peers.build, spec, wanted)) for spec in specs]
    await take_turns(sides, work, options.turns, show)
    progress.clear()
    return Report(sides, work.loads, options.output_tokens)


async def _side(name: str, build: Callable[[], Peer]) -> Side:
    side = Side(name)
    try:
        side.peer = build()
        side.version = await side.peer.version()
    except BenchError as error:
        side.failure = str(error)
    return side


def document(options: argparse.Namespace, flags: Sequence[str], report: Report) -> dict[str, Any]:
    """The result with what one needs to know to repeat it; the API key stays out."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "options": {name: value for name, value in vars(options).items() if name not in ("api_key", "json")},
        "sluice_flags": list(flags),
        "comparison": report.json(),
    }


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    options, specs, flags = parse(argv)
    try:
        report = run_until_told(compare(options, specs, flags))
    except BenchError as error:
        print(f"compare: {error}", file=sys.stderr)
        return error.status
    print(json.dumps(document(options, flags, report), indent=2, default=str) if options.json else report.table())
    return 1 if any(side.failed for side in report.sides) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
