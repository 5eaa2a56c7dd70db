"""A cache in another type than the model computes in, from the runner's option to the logits."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from loadtest.architectures import VOCAB, tiny_model
from server.kvpool.layout import CACHE_DTYPES
from server.kvpool.quantise import storage_dtype
from server.model.runner import ModelRunner
from server.step import NonFiniteLogits, SamplingParams
from tests.model.paging import PagedSequences
from tests.model.test_runner import sampling

BLOCK_SIZE = 4
LENGTHS = (23, 9, 14)
WHOLE = [LENGTHS]
CHUNKS = [(10, 6, 5), (6, 1, 4), (4, 1, 1), (1, 1, 1), (1, 0, 1), (1, 0, 1), (0, 0, 1)]
ONE_BY_ONE = [(1, 1, 1)] * max(LENGTHS)
ALONE = [(7, 0, 0)] * 4 + [(0, 4, 0)] * 3 + [(0, 0, 14)]
ARCHITECTURES = ["llama", "gemma3_text", "minicpm3"]  # alike layers, groups of windows, latents
TYPES = ["int8", "fp8", "bfloat16", "float16"]


@dataclass
class Computed:
    """For each sequence its logits [n, V], and for each layer its keys and values as the pool holds them."""

    logits: list[Tensor]
    rows: list[Tensor]


@cache
def runner_of(architecture: str, cache_dtype: str, backend: str) -> ModelRunner:
    return ModelRunner(tiny_model(architecture), backend, BLOCK_SIZE, cache_dtype=cache_dtype)


def compute(architecture: str, cache_dtype: str, steps: Sequence[Sequence[int]], backend: str = "cpu") -> Computed:
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    runner = runner_of(architecture, cache_dtype, backend)
    layout = runner.layout
    groups = len(layout.groups)
    runner.allocate(40 * groups)
    runner.pool.fill_(float("nan"))
    assert runner.pool.nbytes == 40 * groups * layout.bytes_per_block
    paged = PagedSequences(sequences, 40 * groups, BLOCK_SIZE, num_groups=groups)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    slots: list[list[Tensor]] = [[] for _ in sequences]
    for sizes in steps:
        plan, parts = paged.plan(sizes)
        lengths = [size for _, _, size in parts]
        own = torch.from_numpy(plan.slots).split(lengths, 1)
        for (index, _, _), actual, at in zip(parts, runner.compute_logits(plan).split(lengths), own, strict=True):
            logits[index].append(actual)
            slots[index].append(at)
    assert paged.done == list(LENGTHS)
    at = torch.cat([torch.cat(own, 1) for own in slots], 1)
    rows = [
        part
        for group, at_of_group in zip(layout.groups, at, strict=True)
        for layer in group.layers
        for part in runner.pool.read(layer, at_of_group)
    ]
    return Computed([torch.cat(own) for own in logits], rows)


def difference(one: Computed, other: Computed) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one.logits, other.logits, strict=True))


def flipped(one: Computed, other: Computed) -> float:
    """Share of the stored numbers that were rounded to another step."""
    apart = [(a - b).abs() > 1e-5 * a.abs().amax(-1, keepdim=True) for a, b in zip(one.rows, other.rows, strict=True)]
    return torch.cat([part.flatten() for part in apart]).float().mean().item()


@pytest.mark.parametrize("cache_dtype", TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chunks_and_company_change_nothing(architecture: str, cache_dtype: str) -> None:
    """The step that computes a token attends to what is stored of it, as all later ones do.

    A number that lies between two steps, within float32's own rounding, may go either way. There is hardly ever one,
    and then it is off by a step: a small part of what the type loses anyway.
    """
    whole = compute(architecture, cache_dtype, WHOLE)
    lost = difference(whole, compute(architecture, "auto", WHOLE))
    assert lost > 1e-5, "the cache is not of another type at all"
    largest = max(logits.abs().max().item() for logits in whole.logits)
    for steps, backend in ((CHUNKS, "cpu"), (ONE_BY_ONE, "cpu"), (ALONE, "cpu"), (CHUNKS, "reference")):
        other = compute(architecture, cache_dtype, steps, backend)
        share = flipped(whole, other)
        assert share < 0.005
        assert difference(whole, other) < (3e-6 * largest if share == 0 else lost / 3)


@pytest.mark.parametrize(
    ("cache_dtype", "bound"), [("float16", 0.002), ("bfloat16", 0.008), ("int8", 0.02), ("fp8", 0.1)]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_move_little(architecture: str, cache_dtype: str, bound: float) -> None:
    """Relative to the logits' own size."""
    exact = compute(architecture, "auto", CHUNKS)
    stored = compute(architecture, cache_dtype, CHUNKS)
    for actual, expected in zip(stored.logits, exact.logits, strict=True):
        assert ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < bound


def test_float32_in_a_float32_model_is_the_models_own_type() -> None:
    assert difference(compute("llama", "float32", CHUNKS), compute("llama", "auto", CHUNKS)) == 0


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_the_check_at_load_judges_the_model_and_not_its_cache(
    cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    chunked = ModelRunner._chunked_logits

    def watched(self: ModelRunner, *args: object) -> Tensor:
        checked.append(self.layout.dtype.name)
        return chunked(self, *args)

    monkeypatch.setattr(ModelRunner, "_chunked_logits", watched)
    runner = ModelRunner(tiny_model("llama"), "cpu", 4, cache_dtype=cache_dtype)
    assert checked == ["float32"] * 2
    assert runner.layout.dtype == CACHE_DTYPES[cache_dtype]
    assert runner.pool.storages[0].dtype == storage_dtype(CACHE_DTYPES[cache_dtype])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8", "float16"])
def test_a_sequence_that_overflows_fails_alone(backend: str, cache_dtype: str) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.get_input_embeddings().weight[30] = float("nan")
    healthy = runner_of("llama", cache_dtype, backend)
    runner = ModelRunner(model, backend, 4, cache_dtype=cache_dtype)
    expected = None
    for each in (healthy, runner):
        each.allocate(20)
        each.pool.fill_(float("nan"))
        paged = PagedSequences([[5, 6, 7, 8, 9], [20, 30, 22, 23, 24]], 20, 4)
        for sizes in ([3, 3], [1, 1], [1, 1]):
            plan, _ = paged.plan(sizes)
            logits = each.compute_logits(plan)
        if expected is None:
            expected = logits[0]
    torch.testing.assert_close(logits[0], expected, atol=1e-5, rtol=0)
    with pytest.raises(NonFiniteLogits) as caught:
        runner.run(sampling(plan, [0, 1], SamplingParams(temperature=0.0)))
    assert caught.value.sequences == (1,)


@pytest.mark.parametrize("architecture", ["llama", "minicpm3"])
def test_what_keys_received_is_noted_where_they_are_stored(architecture: str) -> None:
    """Scores belong to slots of the pool, wherever attention had the keys laid out."""
    scores = []
    for backend in ("cpu", "reference"):
        runner = ModelRunner(tiny_model(architecture), backend, 4, cache_dtype="int8", scored=True)
        runner.allocate(40)
        runner.pool.fill_(0.0)
        paged = PagedSequences([list(range(5, 24)), list(range(30, 39))], 40, 4)
        for sizes in ([9, 6], [1, 1], [5, 1], [1, 1]):
            plan, _ = paged.plan(sizes)
            runner.compute_logits(replace(plan, observed=np.array([True, False])))
        assert runner.pool.scores is not None
        scores.append(torch.stack(runner.pool.scores))
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)
    queries_of_a_kv_head = runner.specs[0].num_heads // runner.specs[0].num_kv_heads
    assert scores[0].sum(-1) == pytest.approx(16 * queries_of_a_kv_head, rel=1e-4)


def test_steps_take_no_new_memory_to_unpack_in() -> None:
    runner = runner_of("llama", "int8", "cpu")
    assert runner.unpacked_block_bytes == 4 * 2 * 2 * 16 * 4  # tokens, keys and values, heads, width, float32
    assert runner_of("llama", "int8", "reference").unpacked_block_bytes == 0
    assert runner_of("llama", "auto", "cpu").unpacked_block_bytes == 0
    runner.allocate(20)
    paged = PagedSequences([list(range(3, 40)), list(range(3, 30))], 20, 4)
    seen = set()
    for sizes in ([9, 9], [1, 1], [20, 1], [1, 10]):
        runner.compute_logits(paged.plan(sizes)[0])
        seen.add(tuple(storage.data_ptr() for storage in runner.pool.unpacked.storages))
    assert len(seen) == 1
    assert runner.pool.unpacked.nbytes == 20 * runner.unpacked_block_bytes
