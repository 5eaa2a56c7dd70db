"""How long a decode step takes by the kind of cache, and how fast compactions and copies to host memory are."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from loadtest.checkpoint import Size, random_model
from server.kvpool.compaction import compact
from server.kvpool.host import HostTensors
from server.kvpool.layout import CACHE_DTYPES, AttentionKind, CacheLayout, LayerLayout
from server.kvpool.tensors import KVTensors
from server.model.runner import ModelRunner
from server.model.trial import pack
from server.step import Compaction, EvictionPolicy

_LEAST = 3
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured.

    batches: of decode steps, (sequences, tokens in the cache of each). compacted: tokens of a sequence that gives half
    of them up. copied_bytes: saved and loaded at once. seconds: each measurement is repeated for so long, and thrice.
    """

    batches: tuple[tuple[int, int], ...]
    compacted: int
    copied_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement: the median in milliseconds, and the bytes it moves; no time where it failed, as `note` says.

    For decode steps `moved_bytes` is what is stored of the tokens that they attend to.
    """

    what: str
    milliseconds: float | None
    moved_bytes: int = 0
    note: str = ""

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.moved_bytes / self.milliseconds / 1e6 if self.milliseconds else None

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"gigabytes_per_second": self.gigabytes_per_second}


Measured = tuple[float, int]
"""Median in milliseconds, bytes moved."""


def run_timings(size: Size, work: Work, device: str, deadline: float, show: Callable[[str], None]) -> list[Timing]:
    """All of them, each on its own: one that fails, or would begin later than `deadline`, is a Timing with a note."""
    timings = []
    for names, measure in _measurements(size, work, torch.device(device)):
        show(f"measuring {names[0]}")
        if time.monotonic() > deadline:
            timings += [Timing(name, None, note="not done: the time for the whole check was over") for name in names]
            continue
        try:
            found = measure()
        except Exception as failure:
            timings += [Timing(name, None, note=f"{type(failure).__name__}: {failure}") for name in names]
        else:
            timings += [Timing(name, *measured) for name, measured in zip(names, found, strict=True)]
        gc.collect()  # a model and its hooks hold each other: the next one needs their memory
        if device == "cuda":
            torch.cuda.empty_cache()
    return timings


def _measurements(
    size: Size, work: Work, device: torch.device
) -> Iterator[tuple[list[str], Callable[[], list[Measured]]]]:
    kinds = [(cache, False, False) for cache in ("auto", "int8", "fp8")]
    kinds += [("auto", True, False), ("auto", False, True), ("int8", False, True)]
    for cache, scored, latent in kinds:
        words = f"{'bfloat16' if cache == 'auto' else cache}{' latent' if latent else ''}{' scored' if scored else ''}"
        names = [f"decode {words}, {batch} x {context:,}" for batch, context in work.batches]
        yield names, partial(decode_steps, size, work, cache, scored, latent, device)
    policies: tuple[EvictionPolicy, ...] = ("h2o", "window")
    for cache in ("bfloat16", "int8"):
        names = [f"{policy} of {work.compacted:,} tokens, {cache}" for policy in policies]
        yield names, partial(compactions, size, work, policies, cache, device)
    names = [f"{way}, {how}" for how in ("one run", "single blocks") for way in ("save to host", "load from host")]
    yield names, partial(copies, size, work, device)


def decode_steps(
    size: Size, work: Work, cache: str, scored: bool, latent: bool, device: torch.device
) -> list[Measured]:
    """Passes of one token for each sequence of a batch, with all sequences observed where `scored`."""
    model = _latent_model(size, device) if latent else random_model(size, str(device))
    runner = ModelRunner(model, "auto", _BLOCK_SIZE, cache_dtype=cache, scored=scored)
    widest = max(batch * -(-context // _BLOCK_SIZE) for batch, context in work.batches)
    runner.allocate(1 + widest)
    runner.pool.fill_(0.0)
    found = []
    for batch, context in work.batches:
        blocks = random.Random(0).sample(range(1, 1 + widest), widest)
        each = -(-context // _BLOCK_SIZE)
        tables = [blocks[row * each : (row + 1) * each] for row in range(batch)]
        plan = pack([([5], context - 1, [table]) for table in tables], _BLOCK_SIZE)
        plan = replace(plan, num_decodes=batch, observed=np.ones(batch, dtype=np.bool_) if scored else None)
        taken = measure(partial(runner.compute_logits, plan), work.seconds, device)
        found.append((taken, batch * context * runner.layout.bytes_per_token))
    return found


def compactions(
    size: Size, work: Work, policies: Sequence[EvictionPolicy], cache: str, device: torch.device
) -> list[Measured]:
    """A sequence that keeps the half of its tokens, in scattered blocks."""
    count = -(-work.compacted // _BLOCK_SIZE)
    pool = _pool(size, cache, 1 + count, device)
    table = np.array(random.Random(0).sample(range(1, 1 + count), count), dtype=np.int32)
    keep = work.compacted // 2
    found = []
    for policy in policies:
        for scores, _ in pool.scores_with_layers:
            scores.uniform_()
        what = Compaction(table, work.compacted, keep, 4, keep // 2, policy)
        found.append((measure(partial(compact, pool, what), work.seconds, device), keep * pool.layout.bytes_per_token))
    return found


def copies(size: Size, work: Work, device: torch.device) -> list[Measured]:
    """Saves and loads, of blocks in a row and of blocks anywhere."""
    block_bytes = _pool(size, "bfloat16", 1, device).layout.bytes_per_block
    count = max(2, work.copied_bytes // block_bytes)
    pool = _pool(size, "bfloat16", count, device)
    host = HostTensors(pool, count)
    anywhere = random.Random(0).sample(range(count), count)
    found = []
    for order in (list(range(count)), anywhere):
        pairs = list(zip(order, range(count), strict=True))
        back = [(place, block) for block, place in pairs]
        found += [
            (measure(partial(copy, its), work.seconds, device), host.nbytes)
            for copy, its in ((host.save, pairs), (host.load, back))
        ]
    return found


@torch.inference_mode()
def measure(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """The median time of a call in milliseconds, the device's work included, after one that warms up."""
    call()
    taken: list[float] = []
    while len(taken) < _LEAST or sum(taken) < seconds:
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _pool(size: Size, cache: str, num_blocks: int, device: torch.device) -> KVTensors:
    """A pool with scores for the layers of a Llama of this size, of zeros."""
    head_dim = size.hidden // size.heads
    layers = (LayerLayout(AttentionKind.GQA, size.kv_heads, head_dim, head_dim),) * size.layers
    layout = CacheLayout(layers, CACHE_DTYPES[cache], _BLOCK_SIZE, scored=True)
    pool = KVTensors(layout, num_blocks, torch.bfloat16, device)
    pool.fill_(0.0)
    return pool


def _latent_model(size: Size, device: torch.device) -> PreTrainedModel:
    """A model with latents, about as large as a Llama of this size; a latent is eight times as wide as the rotary key,
    as DeepSeek-V2's is (arXiv:2405.04434, section 3.1.2)."""
    width = size.hidden // size.heads
    end = size.vocab - 1
    options: dict[str, Any] = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "max_position_embeddings": size.context,
        "kv_lora_rank": 8 * width,
        "q_lora_rank": size.hidden // 2,
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": width,
        "v_head_dim": width,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING["minicpm3"](**options), dtype=torch.bfloat16
        )
    return model
