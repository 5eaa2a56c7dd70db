"""Do the ways of keeping the cache work on this device? Quantised, giving tokens up, copied to host memory.

The oracle is the same code on the CPU with the reference backend, whose own tests hold it against plain loops and
unmodified models. All in float32 with TF32 off, on tiny models, so that a wrong number stands out of rounding.

Bytes are compared where both sides start from the same numbers: what is written of the same rows, what compactions of
the same pool move, what comes back from host memory. Where a model computes them, two devices round differently, and a
number on the edge between two steps of int8, fp8 or bfloat16 may go either way: so does a small share, by one step, and
each moves the logits by a part of what the type loses anyway. Where none has, logits agree as in float32.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from loadtest.architectures import VOCAB, tiny_model
from loadtest.equality import (
    FLOAT32_TOLERANCE,
    Finding,
    Outcome,
    Paged,
    attempt,
    compute_exactly,
    draw_sequences,
    eager_logprobs,
    largest,
    logprobs_of,
    move,
)
from server.kvpool.compaction import compact
from server.kvpool.host import HostTensors
from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout
from server.kvpool.tensors import KVTensors
from server.model.runner import ModelRunner
from server.model.trial import pack
from server.step import Compaction, EvictionPolicy, StepPlan

CACHES = ("int8", "fp8", "bfloat16")
MODELS = ("llama", "gemma3_text", "minicpm3")  # layers alike, groups of windows, latents
EVICTING = ("llama", "minicpm3")
POLICIES: tuple[EvictionPolicy, ...] = ("h2o", "window")
FLIPPED_BY_DEVICE = 1e-4
"""Share of numbers that may be rounded to another step though they were the same before."""
FLIPPED_BY_MODEL = 0.005
"""The same, for numbers that the model computed, from others that may have been rounded to another step."""
LOST_SHARE = 1 / 3
"""Of what the type loses, how much flips may move the log-probabilities."""

_CPU = torch.device("cpu")
_BLOCK_SIZE = 4
_LAYERS = (
    LayerLayout(AttentionKind.GQA, 2, 64, 64),
    LayerLayout(AttentionKind.MHA, 4, 24, 16),
    LayerLayout(AttentionKind.MLA, 1, 72, 0, rope_dim=8),
    LayerLayout(AttentionKind.GQA, 2, 64, 64),
)
_BLOCKS = 65


def run_cache_checks(device: str, seed: int, deadline: float, show: Callable[[str], None]) -> list[Outcome]:
    """All of them, none later than `deadline` of the monotonic clock."""
    compute_exactly()
    outcomes = []
    for name, dtype, find in _checks(torch.device(device), seed):
        show(f"{name}, {dtype} cache")
        outcomes.append(attempt(name, dtype, deadline, find))
    return outcomes


def _checks(device: torch.device, seed: int) -> Iterator[tuple[str, str, Callable[[], Finding]]]:
    for cache in CACHES:
        yield "written by float32", cache, partial(bytes_written, cache, torch.float32, device, seed)
    for cache in ("int8", "fp8"):
        yield "written by bfloat16", cache, partial(bytes_written, cache, torch.bfloat16, device, seed)
    for name in MODELS:
        for cache in CACHES:
            yield f"logits of {name}", cache, partial(logits_of_cache, name, cache, device, seed)
    for policy in POLICIES:
        for cache in ("float32", *CACHES):
            yield f"moved by {policy}", cache, partial(moved_rows, cache, policy, device, seed)
        for name in EVICTING:
            yield f"{policy} in {name}", "float32", partial(evicting_model, name, policy, device, seed)
    for cache in ("float32", *CACHES):
        yield "host copies", cache, partial(host_copies, cache, device, seed)
    yield "host copies in steps", "float32", partial(host_steps, device, seed)


def bytes_written(cache: str, computed: torch.dtype, device: torch.device, seed: int) -> Finding:
    """The same rows written here and on the CPU: the share of stored numbers that differ. What is read must be what
    `write` said, and the same here as on the CPU from the same bytes."""
    here, there = _pool(cache, device, computed), _pool(cache, _CPU, computed)
    slots = torch.randperm(there.num_blocks * _BLOCK_SIZE, generator=_generator(seed))
    complaints = set()
    for layer, (key, value) in enumerate(_rows(seed, computed)):
        there.write(layer, slots, key, value)
        said = here.write(layer, slots.to(device), key.to(device), value.to(device))
        if not all(map(torch.equal, said, here.read(layer, slots.to(device)))):
            complaints.add("what is read is not what was written")
    flipped, steps, scales = _difference(here, there)
    _copy_storages(there, here)
    for layer in range(len(_LAYERS)):
        read = here.read(layer, slots.to(device))
        if not all(torch.equal(a.cpu(), b) for a, b in zip(read, there.read(layer, slots), strict=True)):
            complaints.add("the same bytes are read as other numbers")
    complaints |= _complaints(steps, scales)
    return Finding(flipped, FLIPPED_BY_DEVICE, "; ".join(sorted(complaints)))


def logits_of_cache(name: str, cache: str, device: torch.device, seed: int) -> Finding:
    """Log-probabilities of a model over such a cache, here and on the CPU, and what both have stored."""
    sequences = draw_sequences(seed)
    model = tiny_model(name, seed)
    there = Paged(copy.deepcopy(model), "reference", seed, cache)
    expected = there.logprobs(sequences)
    exact = Paged(copy.deepcopy(model), "reference", seed).logprobs(sequences)
    move(model, device, torch.float32)
    here = Paged(model, "auto", seed, cache)
    error = largest(torch.cat(here.logprobs(sequences)), torch.cat(expected))
    lost = largest(torch.cat(expected), torch.cat(exact))
    if lost <= FLOAT32_TOLERANCE:
        return Finding(error, FLOAT32_TOLERANCE, "the cache is not of another type at all")
    flipped, steps, scales = _difference(here.runner.pool, there.runner.pool)
    complaints = set()
    if not flipped <= FLIPPED_BY_MODEL:
        complaints.add(f"{flipped:.2%} of the stored numbers differ")
    if flipped == 0:
        complaints |= _complaints(steps, scales)
    tolerance = FLOAT32_TOLERANCE if flipped == 0 else max(FLOAT32_TOLERANCE, LOST_SHARE * lost)
    return Finding(error, tolerance, "; ".join(sorted(complaints)))


def moved_rows(cache: str, policy: EvictionPolicy, device: torch.device, seed: int) -> Finding:
    """Compactions of equal pools, here and on the CPU: how many bytes differ then. Of the scores many are equal."""
    here, there = _pool(cache, device, scored=True), _pool(cache, _CPU, scored=True)
    generator = _generator(seed)
    slots = torch.arange(there.num_blocks * _BLOCK_SIZE)
    for layer, (key, value) in enumerate(_rows(seed)):
        there.write(layer, slots, key, value)
    for scores, _ in there.scores_with_layers:
        scores.copy_(torch.randint(0, 8, scores.shape, generator=generator) / 7)
    _copy_storages(there, here)
    blocks = list(range(1, _BLOCKS))
    random.Random(seed).shuffle(blocks)
    for first, count, keep in ((0, 36, 70), (36, 28, 41)):
        table = np.array(blocks[first : first + count], dtype=np.int32)
        compaction = Compaction(table, count * _BLOCK_SIZE - 1, keep, sinks=4, recent=keep // 2, policy=policy)
        compact(here, compaction)
        compact(there, compaction)
    differing = sum(
        int((_bytes(a).cpu() != _bytes(b)).sum()) for a, b in zip(here.storages, there.storages, strict=True)
    )
    return Finding(differing, 0)


def evicting_model(name: str, policy: EvictionPolicy, device: torch.device, seed: int) -> Finding:
    """A model that gives tokens up as it goes, here and on the CPU: the largest difference in log-probabilities,
    relative to 1 in the scores of attention, and in the rows that were kept."""
    length, keep = 36, 20
    table = random.Random(seed).sample(range(1, 14), 12)
    text = [random.Random(seed).randrange(3, VOCAB) for _ in range(length + 12)]
    runners = []
    for place, backend in ((device, "auto"), (_CPU, "reference")):
        model = tiny_model(name, seed)
        move(model, place, torch.float32)
        runners.append(ModelRunner(model, backend, _BLOCK_SIZE, scored=policy == "h2o"))
        runners[-1].allocate(14)
        runners[-1].pool.fill_(float("nan"))
    here, there = runners
    watched = np.array([True]) if policy == "h2o" else None
    errors = []

    def step(first: int, count: int, gone: int = 0, compactions: tuple[Compaction, ...] = ()) -> None:
        plan = pack([(text[first : first + count], first - gone, [table])], _BLOCK_SIZE, first_position=first)
        plan = replace(_scored(plan), observed=watched, compactions=compactions)
        errors.append(largest(logprobs_of(here.run(plan).scores), logprobs_of(there.run(plan).scores)))

    slots = torch.tensor([table[index // _BLOCK_SIZE] * _BLOCK_SIZE + index % _BLOCK_SIZE for index in range(length)])
    step(0, 23)
    for first in range(23, length):
        step(first, 1)
    if policy == "h2o":  # then from the same scores, so that near ties are decided alike
        pairs = list(zip(here.pool.scores_with_layers, there.pool.scores_with_layers, strict=True))
        for (own, _), (expected, _) in pairs:
            received = own[..., slots.to(device)].cpu() / expected[..., slots]
            errors.append(largest(received, torch.ones_like(received)))
            own.copy_(expected)
    gone = length - keep
    what = Compaction(np.array(table[: length // _BLOCK_SIZE], dtype=np.int32), length, keep, 4, keep // 2, policy)
    step(length, 5, gone, (what,))
    for layer in range(len(here.layout.layers)):
        ours, theirs = here.pool.read(layer, slots[:keep].to(device)), there.pool.read(layer, slots[:keep])
        errors += [largest(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)]
    for first in range(length + 5, len(text)):
        step(first, 1, gone)
    return Finding(_worst(errors), FLOAT32_TOLERANCE)


def host_copies(cache: str, device: torch.device, seed: int) -> Finding:
    """Blocks saved, overwritten and loaded elsewhere without a pause: how many bytes differ. On CUDA the host's memory
    must be pinned, as a copy would otherwise wait for the CPU, and this proof of the order prove nothing."""
    pool = _pool(cache, device, scored=True)
    generator = torch.Generator(device).manual_seed(seed)
    for storage in pool.storages:
        _bytes(storage).random_(0, 256, generator=generator)
    host = HostTensors(pool, _BLOCKS)
    expected = [_by_block(storage).clone().cpu() for storage in pool.storages]
    where = list(range(_BLOCKS))
    together, scattered = where[: _BLOCKS // 2], where[_BLOCKS // 2 :]
    draw = random.Random(seed)
    for _ in range(8):
        places, targets = ([*together, *draw.sample(scattered, len(scattered))] for _ in range(2))
        host.save(list(zip(where, places, strict=True)))
        pool.fill_(0.0)
        host.load(list(zip(places, targets, strict=True)))
        where = targets
    found = [_by_block(storage).cpu()[where] for storage in pool.storages]
    differing = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
    pinned = device.type != "cuda" or all(storage.is_pinned() for storage in host._host)
    return Finding(differing, 0, "" if pinned else "the host's memory is not pinned")


def host_steps(device: torch.device, seed: int) -> Finding:
    """A text goes on from blocks that steps have saved, written over and loaded elsewhere; against the unmodified
    model."""
    text, other, begun = list(range(5, 16)), list(range(40, 46)), 8
    model = tiny_model("llama", seed)
    expected = eager_logprobs(model, text)[begun:]
    move(model, device, torch.float32)
    runner = ModelRunner(model, "auto", _BLOCK_SIZE)
    runner.allocate(10)
    runner.allocate_host(3)
    runner.pool.fill_(float("nan"))
    runner.run(pack([(text[:begun], 0, [[3, 4]])], _BLOCK_SIZE))
    runner.run(replace(pack([(other, 0, [[4, 3]])], _BLOCK_SIZE), saves=((3, 2), (4, 0))))
    rest = _scored(pack([(text[begun:], begun, [[7, 5, 8]])], _BLOCK_SIZE))
    result = runner.run(replace(rest, loads=((2, 7), (0, 5))))
    return Finding(largest(logprobs_of(result.scores), expected), FLOAT32_TOLERANCE)


def _pool(
    cache: str, device: torch.device, computed: torch.dtype = torch.float32, *, scored: bool = False
) -> KVTensors:
    layout = CacheLayout(_LAYERS, CACHE_DTYPES[cache], _BLOCK_SIZE, scored=scored)
    pool = KVTensors(layout, _BLOCKS, computed, device)
    pool.fill_(0.0)
    return pool


def _rows(seed: int, computed: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of each layer for all slots of a pool, of magnitudes from 1e-6 to 1e3, some all zero."""
    generator = _generator(seed)
    count = _BLOCKS * _BLOCK_SIZE
    for layer in _LAYERS:
        rows = []
        for dim in (layer.key_dim, layer.value_dim):
            size = 10 ** torch.empty(layer.kv_heads, count, 1).uniform_(-6, 3, generator=generator)
            size[:, ::17] = 0
            rows.append((size * torch.randn(layer.kv_heads, count, dim, generator=generator)).to(computed))
        yield rows[0], rows[1]


def _difference(one: KVTensors, other: KVTensors) -> tuple[float, int, float]:
    """Of two pools: the share of stored numbers that differ, by how many steps at most, and the largest relative
    difference of scales. For caches of other types than the model's."""
    apart, scales = [], [0.0]
    for a, b in zip(one.storages, other.storages, strict=True):
        if a.dtype == torch.float32:
            both_nan = a.cpu().isnan() & b.isnan()
            scales.append(largest(torch.where(both_nan, 1.0, a.cpu() / b), torch.ones_like(b)))
        else:
            apart.append((_steps(a.cpu()) - _steps(b)).abs().flatten())
    steps = torch.cat(apart)
    return float((steps > 0).float().mean()), int(steps.max()), _worst(scales)


def _steps(stored: Tensor) -> Tensor:
    """Stored numbers as integers in their order: neighbours are one apart."""
    if stored.dtype == torch.int8:
        return stored.int()
    bits = stored.view(torch.uint8 if stored.dtype == torch.uint8 else torch.int16).int()
    sign = 1 << (8 * stored.element_size() - 1)
    size = bits & (sign - 1)
    return torch.where((bits & sign) > 0, -size, size)


def _complaints(steps: int, scales: float) -> set[str]:
    wrong = set()
    if steps > 1:
        wrong.add(f"a stored number is {steps} steps off")
    if not scales <= 1e-5:
        wrong.add(f"a scale is off by a part of {scales:.0e}")
    return wrong


def _copy_storages(source: KVTensors, target: KVTensors) -> None:
    for theirs, ours in zip(source.storages, target.storages, strict=True):
        ours.copy_(theirs)


def _bytes(storage: Tensor) -> Tensor:
    return storage.view(torch.uint8)


def _by_block(storage: Tensor) -> Tensor:
    """The bytes of a storage [layers, 1, kv_heads, slots, width], its blocks first."""
    layers, _, heads, _, width = _bytes(storage).shape
    return _bytes(storage).view(layers, heads, -1, _BLOCK_SIZE, width).movedim(2, 0)


def _scored(plan: StepPlan) -> StepPlan:
    """The plan with the log-probabilities of the whole vocabulary for each of its tokens."""
    count = plan.num_tokens
    rows = np.repeat(np.arange(plan.num_sequences, dtype=np.int32), np.diff(plan.query_starts))
    tops = np.full(count, VOCAB, dtype=np.int64)
    return replace(plan, score_targets=plan.input_ids, score_tops=tops, score_rows=rows)


def _worst(errors: Sequence[float]) -> float:
    return float(np.max(errors))  # a NaN wins


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
