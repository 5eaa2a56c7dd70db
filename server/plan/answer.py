"""What a plan says, worked out from a model's shape and the size of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from server.checkpoint import Weights
from server.config import least_kv_budget
from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheDtype, CacheLayout
from server.kvpool.shapes import ModelShape
from server.kvpool.sizing import paged, reserve_maximum, sequence_bytes, tokens_that_fit, usable_blocks
from server.plan.caches import CacheChoice, cache_choices, default_budgets


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
class HostTier:
    """What main memory keeps of the prefixes that the pool has given up."""

    bytes: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """The model with its heads shared in this way; `own` marks how it really is.

    longest_bytes: what one sequence of the longest of the plan's lengths takes.
    """

    kind: str
    kv_heads: int
    own: bool
    bytes_per_token: int
    longest_bytes: int
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
    """All that `sluice plan` says; `--json` prints it with these names. Sizes are bytes, lengths tokens.

    dtype: of the weights; cache_dtype: of the cache that the plan is about. layers_per_block: a block holds its tokens
    for so many layers. tokens: what the pool holds where every layer sees everything.
    """

    model: str
    model_type: str
    dtype: str
    cache_dtype: str
    max_length: int | None
    block_size: int
    layers: tuple[LayerGroup, ...]
    bytes_per_token: int
    bytes_per_block: int
    layers_per_block: int
    memory_bytes: int
    weight_bytes: int
    weight_parameters: int | None
    weight_source: str
    utilization: float
    cache_bytes: int
    blocks: int
    tokens: int
    host: HostTier | None
    caches: tuple[CacheChoice, ...]
    sharing: tuple[Sharing, ...]
    lengths: tuple[int, ...]
    waste: tuple[Waste, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a model.

    cache_dtype: None for that of the weights. max_length: None for the model's own. seq_lens, budgets: empty for those
    that suggest themselves. host_bytes: of main memory for prefixes. lengths: of real sequences, to compare allocators.
    """

    memory_bytes: int
    block_size: int
    utilization: float
    cache_dtype: str | None = None
    max_length: int | None = None
    seq_lens: tuple[int, ...] = ()
    budgets: tuple[int, ...] = ()
    host_bytes: int = 0
    lengths: tuple[int, ...] = ()


def make_plan(name: str, shape: ModelShape, weights: Weights, dtype: str, ask: Question) -> Plan:
    """Work out everything. Raises PlanError where a length does not fit the model."""
    cache_dtype = CACHE_DTYPES[ask.cache_dtype or dtype]
    layout = shape.layout(cache_dtype, ask.block_size)
    max_length = ask.max_length or shape.max_length
    if max_length is not None and (longest := max((*ask.seq_lens, *ask.lengths), default=0)) > max_length:
        raise PlanError(f"{longest:,} tokens are more than the model's {max_length:,}: raise --max-model-len")
    if ask.budgets and min(ask.budgets) < (least := least_kv_budget(ask.block_size)):
        raise PlanError(f"--kv-budget must be at least {least} tokens with --block-size {ask.block_size}")
    cache_bytes = int(max(0, ask.memory_bytes - weights.nbytes) * ask.utilization)
    default_lens = (length for length in (1024, 4096, max_length or 16384) if length <= (max_length or length))
    seq_lens = sorted(set(ask.seq_lens or default_lens))
    budgets = (ask.budgets or default_budgets(seq_lens, ask.block_size)) if layout.takes_budgets else ()
    return Plan(
        model=name,
        model_type=shape.model_type,
        dtype=dtype,
        cache_dtype=cache_dtype.name,
        max_length=max_length,
        block_size=ask.block_size,
        layers=_groups(shape, cache_dtype),
        bytes_per_token=layout.bytes_per_token,
        bytes_per_block=layout.bytes_per_block,
        layers_per_block=max(len(group.layers) for group in layout.groups),
        memory_bytes=ask.memory_bytes,
        weight_bytes=weights.nbytes,
        weight_parameters=weights.parameters,
        weight_source=weights.source,
        utilization=ask.utilization,
        cache_bytes=cache_bytes,
        blocks=usable_blocks(layout, cache_bytes),
        tokens=tokens_that_fit(layout, cache_bytes),
        host=_host(layout, ask.host_bytes) if ask.host_bytes else None,
        caches=cache_choices(shape, CACHE_DTYPES[dtype], cache_dtype, ask.block_size, budgets, seq_lens, cache_bytes),
        sharing=_sharing(shape, cache_dtype, ask.block_size, cache_bytes, max(seq_lens)),
        lengths=ask.lengths,
        waste=_waste(layout, ask, max_length, cache_bytes) if ask.lengths else (),
        notes=_notes(shape, layout, weights, ask),
    )


def _groups(shape: ModelShape, cache_dtype: CacheDtype) -> tuple[LayerGroup, ...]:
    return tuple(
        LayerGroup(
            layers=count,
            kind=layer.layout.kind.value,
            heads=layer.heads,
            kv_heads=layer.layout.kv_heads,
            key_dim=layer.layout.key_dim,
            value_dim=layer.layout.value_dim,
            window=layer.visibility.reach,
            bytes_per_token=layer.layout.bytes_per_token(cache_dtype),
        )
        for layer, count in Counter(shape.layers).items()
    )


def _host(layout: CacheLayout, nbytes: int) -> HostTier:
    blocks = nbytes // layout.bytes_per_block
    return HostTier(nbytes, blocks, blocks // len(layout.groups) * layout.block_size)


def _sharing(
    shape: ModelShape, cache_dtype: CacheDtype, block_size: int, nbytes: int, longest: int
) -> tuple[Sharing, ...]:
    """The model as it is among the other ways to share its heads, from most cache to least."""
    first = shape.layers[0]
    variants = [shape, shape.sharing(None), shape.sharing(1)]
    group = max((size for size in range(2, 9) if first.heads % size == 0 and size < first.heads), default=None)
    if group is not None and first.layout.kind is not AttentionKind.GQA and _is_uniform(shape):
        variants.append(shape.sharing(group))
    layouts = {variant.layers: variant.layout(cache_dtype, block_size) for variant in variants}
    rows = [
        Sharing(
            kind="/".join(sorted({layer.layout.kind.value for layer in layers})),
            kv_heads=max(layer.layout.kv_heads for layer in layers),
            own=layers == shape.layers,
            bytes_per_token=layout.bytes_per_token,
            longest_bytes=sequence_bytes(layout, longest),
            tokens=tokens_that_fit(layout, nbytes),
        )
        for layers, layout in layouts.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.bytes_per_token))


def _is_uniform(shape: ModelShape) -> bool:
    return len({layer.heads for layer in shape.layers}) == 1


def _waste(layout: CacheLayout, ask: Question, max_length: int | None, nbytes: int) -> tuple[Waste, ...]:
    if max_length is None:
        raise PlanError("the config does not say how long a sequence may be: give --max-model-len")
    allocators = {
        f"reserve {max_length:,} tokens each": reserve_maximum(layout, ask.lengths, max_length, nbytes),
        f"paged, blocks of {ask.block_size}": paged(layout, ask.lengths, nbytes),
    }
    return tuple(
        Waste(name, taken.allocated_bytes, taken.used_bytes, taken.waste_ratio, taken.at_once)
        for name, taken in allocators.items()
    )


def _notes(shape: ModelShape, layout: CacheLayout, weights: Weights, ask: Question) -> tuple[str, ...]:
    notes = []
    if weights.nbytes >= ask.memory_bytes:
        notes.append("the weights alone do not fit the memory: give --memory more, or plan another --dtype")
    if windows := sorted({layer.visibility.reach for layer in shape.layers if layer.visibility.reach is not None}):
        notes += _window_notes(shape, layout, windows)
    if shape.uncached_layers:
        notes.append(
            f"{shape.uncached_layers} more layers keep no keys and values; their state is not counted, and "
            "`sluice serve` refuses such models"
        )
    return tuple(notes)


def _window_notes(shape: ModelShape, layout: CacheLayout, windows: Sequence[int]) -> list[str]:
    """What becomes of tokens that layers with windows see no more."""
    windowed = sum(layer.visibility.reach is not None for layer in shape.layers)
    span = " or ".join(f"{window:,}" for window in windows)
    unbounded = sum(group.visibility.reach is None for group in layout.groups)
    if unbounded == len(layout.groups):
        kept = "only, but the pool keeps the whole context for them too, since the layers do not all store the same"
    elif unbounded:
        block = unbounded * layout.bytes_per_block
        kept = f"and keep no more than that, so that a token further back takes {block // layout.block_size:,} B"
    else:
        kept = "and keep no more than that, however long the sequence is"
    return [
        f"{windowed} of {len(shape.layers)} layers look back {span} tokens {kept}",
        "sequences of a model with windows cannot have a budget (H2O)",
    ]
