"""`sluice plan`: what a model's cache takes and how much of it fits, from a config.json alone."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from server.checkpoint import UnknownCheckpoint, Weights, count_weights, find_checkpoint
from server.config import EMBEDDED_MODEL, parse_size
from server.kvpool.layout import AttentionKind
from server.kvpool.shapes import LayerShape, ModelShape, UnknownShape, read_shape
from server.kvpool.sizing import (
    ELEMENT_BYTES,
    paged,
    reserve_maximum,
    sequences_that_fit,
    tokens_that_fit,
    usable_blocks,
)


class PlanError(Exception):
    """What was asked for does not fit together; the message names the flag."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are alike. `bytes_per_token` is of one of them."""

    layers: int
    kind: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of `tokens` tokens fit at once, and what one takes."""

    tokens: int
    bytes: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """The model with its heads shared in this way; `own` marks how it really is."""

    kind: str
    kv_heads: int
    own: bool
    bytes_per_token: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Waste:
    """What an allocator takes for the given lengths, what of it is filled, and how many such sequences fit at once."""

    allocator: str
    allocated_bytes: int
    used_bytes: int
    waste_ratio: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All that `sluice plan` says; `--json` prints it with these names. Sizes are bytes, lengths tokens."""

    model: str
    model_type: str
    dtype: str
    max_length: int | None
    block_size: int
    layers: tuple[LayerGroup, ...]
    bytes_per_token: int
    bytes_per_block: int
    memory_bytes: int
    weight_bytes: int
    weight_parameters: int | None
    weight_source: str
    utilization: float
    cache_bytes: int
    blocks: int
    tokens: int
    fits: tuple[Fit, ...]
    sharing: tuple[Sharing, ...]
    lengths: tuple[int, ...]
    waste: tuple[Waste, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a model. `max_length` None is the model's own."""

    memory_bytes: int
    block_size: int
    utilization: float
    max_length: int | None
    seq_lens: tuple[int, ...]
    lengths: tuple[int, ...]


def make_plan(name: str, shape: ModelShape, weights: Weights, dtype: str, ask: Question) -> Plan:
    """Work out everything. Raises PlanError where a length does not fit the model."""
    layout = shape.layout(ELEMENT_BYTES[dtype], ask.block_size)
    max_length = ask.max_length or shape.max_length
    if max_length is not None and (longest := max((*ask.seq_lens, *ask.lengths), default=0)) > max_length:
        raise PlanError(f"{longest:,} tokens are more than the model's {max_length:,}: raise --max-model-len")
    cache_bytes = int(max(0, ask.memory_bytes - weights.nbytes) * ask.utilization)
    seq_lens = ask.seq_lens or tuple(
        length for length in (1024, 4096, max_length or 16384) if length <= (max_length or length)
    )
    return Plan(
        model=name,
        model_type=shape.model_type,
        dtype=dtype,
        max_length=max_length,
        block_size=ask.block_size,
        layers=_groups(shape, ELEMENT_BYTES[dtype]),
        bytes_per_token=layout.bytes_per_token,
        bytes_per_block=layout.bytes_per_block,
        memory_bytes=ask.memory_bytes,
        weight_bytes=weights.nbytes,
        weight_parameters=weights.parameters,
        weight_source=weights.source,
        utilization=ask.utilization,
        cache_bytes=cache_bytes,
        blocks=usable_blocks(layout, cache_bytes),
        tokens=tokens_that_fit(layout, cache_bytes),
        fits=tuple(
            Fit(length, length * layout.bytes_per_token, sequences_that_fit(layout, cache_bytes, length))
            for length in sorted(set(seq_lens))
        ),
        sharing=_sharing(shape, ELEMENT_BYTES[dtype], ask.block_size, cache_bytes),
        lengths=ask.lengths,
        waste=_waste(shape, dtype, ask, max_length, cache_bytes) if ask.lengths else (),
        notes=_notes(shape, weights, ask, ELEMENT_BYTES[dtype]),
    )


def _groups(shape: ModelShape, element_bytes: int) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(
            layers=count,
            kind=layer.layout.kind.value,
            heads=layer.heads,
            kv_heads=layer.layout.kv_heads,
            key_dim=layer.layout.key_dim,
            value_dim=layer.layout.value_dim,
            window=layer.window,
            bytes_per_token=layer.layout.elements_per_token * element_bytes,
        )
        for layer, count in Counter(shape.layers).items()
    )


def _sharing(shape: ModelShape, element_bytes: int, block_size: int, nbytes: int) -> tuple[Sharing, ...]:
    """The model as it is among the other ways to share its heads, from most cache to least."""
    first = shape.layers[0]
    variants = [shape, shape.sharing(None), shape.sharing(1)]
    group = max((size for size in range(2, 9) if first.heads % size == 0 and size < first.heads), default=None)
    if group is not None and first.layout.kind is not AttentionKind.GQA and _is_uniform(shape):
        variants.append(shape.sharing(group))
    layouts = {variant.layers: variant.layout(element_bytes, block_size) for variant in variants}
    rows = [
        Sharing(
            kind="/".join(sorted({layer.layout.kind.value for layer in layers})),
            kv_heads=max(layer.layout.kv_heads for layer in layers),
            own=layers == shape.layers,
            bytes_per_token=layout.bytes_per_token,
            tokens=tokens_that_fit(layout, nbytes),
        )
        for layers, layout in layouts.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes_per_token))


def _is_uniform(shape: ModelShape) -> bool:
    return len({layer.heads for layer in shape.layers}) == 1


def _waste(shape: ModelShape, dtype: str, ask: Question, max_length: int | None, nbytes: int) -> tuple[Waste, ...]:
    if max_length is None:
        raise PlanError("the config does not say how long a sequence may be: give --max-model-len")
    layout = shape.layout(ELEMENT_BYTES[dtype], ask.block_size)
    allocators = {
        f"reserve {max_length:,} tokens each": reserve_maximum(layout, ask.lengths, max_length, nbytes),
        f"paged, blocks of {ask.block_size}": paged(layout, ask.lengths, nbytes),
    }
    return tuple(
        Waste(name, taken.allocated_bytes, taken.used_bytes, taken.waste_ratio, taken.at_once)
        for name, taken in allocators.items()
    )


def _notes(shape: ModelShape, weights: Weights, ask: Question, element_bytes: int) -> tuple[str, ...]:
    notes = []
    if weights.nbytes >= ask.memory_bytes:
        notes.append("the weights alone do not fit the memory")
    windowed = [layer for layer in shape.layers if layer.window is not None]
    if windowed:
        notes.append(
            f"{len(windowed)} of {len(shape.layers)} layers look back {_span(windowed)} tokens only; "
            "the pool keeps the whole context for them too"
        )
    if any(layer.layout.kind is AttentionKind.MLA for layer in shape.layers):
        expanded = shape.sharing(None).layout(element_bytes, ask.block_size).bytes_per_token
        notes.append(f"latent attention is served in its expanded form as yet, which takes {expanded:,} B a token")
    if shape.uncached_layers:
        notes.append(
            f"{shape.uncached_layers} more layers keep no keys and values; their state is not counted, and "
            "`sluice serve` refuses such models"
        )
    return tuple(notes)


def _span(layers: Sequence[LayerShape]) -> str:
    return " or ".join(f"{window:,}" for window in sorted({layer.window or 0 for layer in layers}))


def render(plan: Plan) -> str:
    """The plan as text for people."""
    lines = [("Model", f"{plan.model} ({plan.model_type})")]
    lines += [("Layers" if index == 0 else "", _describe(group)) for index, group in enumerate(plan.layers)]
    lines.append(
        (
            "Cache",
            f"{plan.bytes_per_token:,} B a token in {plan.dtype}, {_size(plan.bytes_per_block)} a block of "
            f"{plan.block_size} tokens",
        )
    )
    counted = "" if plan.weight_parameters is None else f"{plan.weight_parameters:,} parameters, "
    lines.append(("Weights", f"{_size(plan.weight_bytes)} ({counted}from {plan.weight_source})"))
    lines.append(
        (
            "Memory",
            f"{_size(plan.memory_bytes)} less the weights, {plan.utilization:g} of the rest: "
            f"{_size(plan.cache_bytes)} of cache, {plan.blocks:,} blocks, {plan.tokens:,} tokens",
        )
    )
    lines += [("Note", note) for note in plan.notes]
    text = "\n".join(f"{label:<9}{content}" for label, content in lines)
    longest = plan.fits[-1].tokens
    tables = [
        _table(
            "Sequences at once",
            ("tokens each", "size each", "sequences"),
            [(f"{fit.tokens:,}", _size(fit.bytes), f"{fit.sequences:,}") for fit in plan.fits],
        ),
        _table(
            "The same layers, heads shared otherwise (* as it is)",
            ("", "kind", "KV heads", "B a token", f"{longest:,} tokens", "tokens that fit"),
            [
                (
                    "*" if row.own else "",
                    row.kind,
                    f"{row.kv_heads}",
                    f"{row.bytes_per_token:,}",
                    _size(row.bytes_per_token * longest),
                    f"{row.tokens:,}",
                )
                for row in plan.sharing
            ],
        ),
    ]
    if plan.waste:
        mean = sum(plan.lengths) / len(plan.lengths)
        tables.append(
            _table(
                f"{len(plan.lengths):,} sequences of {min(plan.lengths):,} to {max(plan.lengths):,} tokens, "
                f"{mean:,.0f} on average",
                ("allocator", "takes", "fills", "wastes", "at once"),
                [
                    (
                        row.allocator,
                        _size(row.allocated_bytes),
                        _size(row.used_bytes),
                        f"{row.waste_ratio:.1%}",
                        f"{row.at_once:,}",
                    )
                    for row in plan.waste
                ],
            )
        )
    return "\n\n".join((text, *tables))


def _describe(group: LayerGroup) -> str:
    stored = (
        f"one latent of {group.key_dim}"
        if group.kind == AttentionKind.MLA.value
        else f"{group.kv_heads} KV heads of {group.key_dim}"
        + ("" if group.value_dim == group.key_dim else f" (values {group.value_dim})")
    )
    window = "" if group.window is None else f", window {group.window:,}"
    return (
        f"{group.layers} {group.kind}: {group.heads} heads, {stored}{window}, {group.bytes_per_token:,} B a token each"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned on the right, except a first one of names."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    left = not rows[0][0][:1].isdigit()
    lines = (
        "  ".join(
            cell.ljust(width) if left and column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
    return "\n".join((title, *(f"  {line}" for line in lines)))


def _size(nbytes: int) -> str:
    """Bytes in the largest unit, up to GiB, of which there is at least one."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 3)
    return f"{nbytes:,} B" if power == 0 else f"{nbytes / 1024**power:,.2f} {'KMG'[power - 1]}iB"


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
    parser.add_argument("--memory", type=_bytes, default="80GiB", metavar="SIZE", help="of the device (default: 80GiB)")
    parser.add_argument(
        "--dtype",
        choices=("auto", *ELEMENT_BYTES),
        default="auto",
        help="of weights and cache (default: the checkpoint's, as on a GPU; a CPU serves float32)",
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
        args.memory, args.block_size, args.utilization, args.max_model_len, tuple(args.seq_len), args.lengths
    )
    try:
        checkpoint = find_checkpoint(args.model, args.revision)
        shape = read_shape(checkpoint.config)
        dtype = args.dtype
        if dtype == "auto":
            dtype = shape.dtype if shape.dtype in ELEMENT_BYTES else "bfloat16"
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
