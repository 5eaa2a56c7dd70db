"""The options of `sluice bench`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from server.bench import lengths

DESCRIPTION = """\
Put load on an OpenAI-compatible server and measure how fast its tokens come.

Without --url it serves a model itself, on a free port, for as long as it measures;
what follows -- goes to `sluice serve`:

  sluice bench                                     the embedded model, 1, 8 and 32 clients
  sluice bench --model DIR -- --max-num-seqs 64    another one, with flags of its server
  sluice bench --url http://host:8000              a server that runs already
  sluice bench --rate 2,4 --duration 60            arrivals at random, 2 and 4 a second
  sluice bench --lengths mixed                     short and long prompts and answers, as people's are
  sluice bench --baseline                          beside a bare loop of forward passes
  sluice bench --compare-prefix-cache              TTFT with the prefix cache on and off
  sluice bench --compare-constrained               tokens/s with half of the requests constrained
"""
API_KEY_VARIABLE = "SLUICE_BENCH_API_KEY"
OUTPUT_TOKENS = 64


def _number(kind: type[int] | type[float], positive: bool = True) -> Callable[[str], int | float]:
    def parse(text: str) -> int | float:
        value = kind(text)
        if not (value > 0 if positive else value >= 0) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be {'above' if positive else 'at least'} 0")
        return value

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def _listed(kind: type[int] | type[float]) -> Callable[[str], list[int | float]]:
    def parse(text: str) -> list[int | float]:
        return [_number(kind)(part) for part in text.split(",")]

    parse.__name__ = "list of " + ("whole numbers" if kind is int else "numbers")
    return parse


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    top = argparse.ArgumentParser(
        "sluice bench",
        usage="sluice bench [options] [-- options of sluice serve]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    target = top.add_argument_group("server")
    target.add_argument("--url", help="server to measure, with or without /v1 (default: one of our own)")
    target.add_argument("--model", help="with --url the name to ask for (default: its first), else what to serve")
    target.add_argument(
        "--api-key", default=os.environ.get(API_KEY_VARIABLE), help=f"bearer token (default: {API_KEY_VARIABLE})"
    )
    target.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    target.add_argument(
        "--timeout", type=_number(float), default=600.0, metavar="S", help="seconds a request may take (default: 600)"
    )
    load = top.add_argument_group("load")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency",
        type=_listed(int),
        metavar="N,N,...",
        help="closed loop: so many clients, each sending when its last request ended (default: 1,8,32)",
    )
    kind.add_argument(
        "--rate",
        type=_listed(float),
        metavar="R,R,...",
        help="open loop: requests a second at random moments, measured from when they were due",
    )
    load.add_argument(
        "--num-requests",
        type=_number(int),
        metavar="N",
        help="of each load (default: 3 a client, at least 8; 64 with --rate)",
    )
    load.add_argument("--duration", type=_number(float), metavar="S", help="stop sending after so many seconds")
    load.add_argument(
        "--warmup",
        type=_number(int, positive=False),
        default=2,
        metavar="N",
        help="requests before, which do not count (default: 2)",
    )
    work = top.add_argument_group("prompts and answers")
    work.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines, or text with a prompt a line (default: 60 of ours)"
    )
    work.add_argument(
        "--shared-prefix",
        type=_number(int),
        metavar="TOKENS",
        help="the same text of so many tokens before each prompt",
    )
    work.add_argument(
        "--verbatim", action="store_true", help="no tag of its own before each prompt: repeated ones may be cached"
    )
    work.add_argument(
        "--output-tokens", type=_number(int), metavar="N", help=f"of each answer (default: {OUTPUT_TOKENS})"
    )
    work.add_argument(
        "--lengths",
        choices=["mixed"],
        help="instead of whole prompts, parts of them of mixed lengths, with answers of mixed lengths, as in "
        f"conversations: about {lengths.PROMPT_TOKENS} tokens in and {lengths.OUTPUT_TOKENS} out on average",
    )
    work.add_argument(
        "--temperature", type=_number(float, positive=False), default=0.0, metavar="T", help="(default: 0, greedy)"
    )
    work.add_argument(
        "--seed",
        type=_number(int, positive=False),
        default=0,
        metavar="N",
        help="of the prompts' order and the arrivals (default: 0)",
    )
    more = top.add_argument_group("comparisons, with a server of our own")
    which = more.add_mutually_exclusive_group()
    which.add_argument(
        "--baseline",
        nargs="?",
        type=_number(int),
        const=32,
        metavar="N",
        help="the server beside a bare loop of the model's forward passes over a static batch of N (default: 32)",
    )
    which.add_argument(
        "--compare-prefix-cache", action="store_true", help="the prefix cache on and off (--shared-prefix default: 512)"
    )
    which.add_argument(
        "--compare-constrained", action="store_true", help="every second request with a JSON schema, and none"
    )
    more.add_argument(
        "--input-tokens", type=_number(int), metavar="N", help="of each prompt of --baseline (default: 128)"
    )
    more.add_argument("--turns", type=_number(int), metavar="N", help="of each side (default: 3)")
    top.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return top


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the benchmark, and those of the server after `--`. Exits with status 2 where they do not fit."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    top = parser()
    options, flags = top.parse_args(argv[:split]), argv[split + 1 :]
    if options.url and flags:
        top.error("options after -- are for a server of our own: leave out --url, or set them on that server")
    if options.url and (options.baseline or options.compare_prefix_cache or options.compare_constrained):
        top.error("--baseline and the comparisons need a server of our own: leave out --url")
    if any(flag.partition("=")[0] in ("--port", "--host") for flag in flags):
        top.error("the benchmark chooses --host and --port of its own server: leave them out")
    fixed = ("concurrency", "rate", "duration", "shared_prefix", "chat", "verbatim", "temperature", "lengths")
    if options.baseline and (given := [name for name in fixed if getattr(options, name)]):
        top.error("--baseline fixes the load, so leave out --" + ", --".join(given).replace("_", "-"))
    if options.input_tokens and not options.baseline:
        top.error("--input-tokens is for --baseline; other prompts are as long as they are")
    if options.turns and not (options.baseline or options.compare_prefix_cache or options.compare_constrained):
        top.error("--turns is for --baseline, --compare-prefix-cache and --compare-constrained")
    if options.lengths and options.output_tokens:
        top.error("--lengths mixed says how long answers are: leave out --output-tokens")
    options.turns = options.turns or 3
    options.output_tokens = options.output_tokens or OUTPUT_TOKENS
    options.input_tokens = options.input_tokens or 128
    if options.compare_prefix_cache and options.shared_prefix is None:
        options.shared_prefix = 512
    if options.model and not options.url:
        flags.insert(0, options.model)
    return options, flags
