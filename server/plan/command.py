"""The options of `sluice plan`, and the command itself."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from server.checkpoint import UnknownCheckpoint, Weights, count_weights, find_checkpoint
from server.config import EMBEDDED_MODEL
from server.kvpool.layout import CACHE_DTYPES, WEIGHT_DTYPES
from server.kvpool.shapes import UnknownShape, read_shape
from server.plan.answer import PlanError, Question, make_plan
from server.plan.caches import DEFAULT_BUDGET
from server.plan.render import render
from server.values import MOST_BYTES, parse_size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sluice plan",
        description="Works out what the KV cache of a model takes and how much of it fits, without loading weights.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL_OR_CONFIG",
        help=f"config.json, directory, .gguf file or Hugging Face id (default: the embedded {EMBEDDED_MODEL})",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    parser.add_argument(
        "--memory",
        type=_bytes,
        default="80GiB",
        metavar="SIZE",
        help="of the device, as 80GiB; a bare number is bytes (default: 80GiB)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *WEIGHT_DTYPES),
        default="auto",
        help="of the weights (default: the checkpoint's, as on a GPU; a CPU serves float32)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *CACHE_DTYPES),
        default="auto",
        help="of the cache that the plan is about (default: that of the weights)",
    )
    parser.add_argument(
        "--kv-budget",
        type=_count,
        nargs="+",
        default=[],
        metavar="N",
        help=f"budgets to compare: tokens that H2O keeps (default: {DEFAULT_BUDGET:,} where the lengths exceed it)",
    )
    parser.add_argument(
        "--kv-host-memory",
        type=_bytes,
        default=0,
        metavar="SIZE",
        help="main memory for prefixes that the cache gives up (default: none)",
    )
    parser.add_argument("--block-size", type=_count, default=16, metavar="N", help="tokens a block holds (default: 16)")
    parser.add_argument(
        "--utilization",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="share of the memory left by the weights that the cache takes (default: 0.9)",
    )
    parser.add_argument("--weights-bytes", type=_bytes, metavar="SIZE", help="size of the weights, instead of counting")
    parser.add_argument("--max-model-len", type=_count, metavar="N", help="longest sequence (default: the model's)")
    parser.add_argument(
        "--seq-len",
        type=_count,
        nargs="+",
        default=[],
        metavar="N",
        help="lengths to fit (default: some up to the longest)",
    )
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=(),
        metavar="FILE_OR_LIST",
        help="lengths of real sequences, as 120,980,45 or a file of them: compares allocators",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, such as 80GiB or 512MB") from error
    assert isinstance(size, int)
    if size > MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST_BYTES // 2**40}TiB")
    return size


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0, at most 1")
    return share


def _lengths(text: str) -> tuple[int, ...]:
    try:
        content = text if re.fullmatch(r"[\d\s,]+", text) else Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths, nor a file: {error.strerror}") from error
    lengths = tuple(_count(word) for word in re.split(r"[\s,\[\]]+", content) if word)
    if not lengths:
        raise argparse.ArgumentTypeError(f"{text!r} has no lengths")
    return lengths


def main(argv: Sequence[str]) -> int:
    """Run `sluice plan` with these arguments; returns the exit status."""
    args = _parser().parse_args(argv)
    ask = Question(
        memory_bytes=args.memory,
        block_size=args.block_size,
        utilization=args.utilization,
        cache_dtype=None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        max_length=args.max_model_len,
        seq_lens=tuple(args.seq_len),
        budgets=tuple(args.kv_budget),
        host_bytes=args.kv_host_memory,
        lengths=args.lengths,
    )
    try:
        checkpoint = find_checkpoint(args.model, args.revision)
        shape = read_shape(checkpoint.config)
        dtype = args.dtype
        if dtype == "auto":
            dtype = shape.dtype if shape.dtype in WEIGHT_DTYPES else "bfloat16"
        if args.weights_bytes is None:
            weights = count_weights(checkpoint, dtype)
        else:
            weights = Weights(args.weights_bytes, None, "--weights-bytes")
        plan = make_plan(checkpoint.name, shape, weights, dtype, ask)
    except (UnknownCheckpoint, UnknownShape, PlanError) as error:
        print(f"sluice plan: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(plan), indent=2) if args.json else render(plan))
    return 0
