"""The attention that keys receive, against unmodified models; and what a sequence makes of what it kept by it, against
a simulation that attends head by head to lists of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface

import server.model.attention.cpu
import server.model.attention.reference
from loadtest.architectures import VOCAB, tiny_model
from server.kvpool.layout import CACHE_DTYPES, CacheLayout
from server.kvpool.tensors import KVTensors
from server.model.attention import select_backends
from server.model.attention.metadata import StepMetadata
from server.model.runner import ModelRunner
from server.model.spec import LayerSpec
from server.model.trial import pack
from server.step import Compaction, EvictionPolicy, StepPlan, StepResult
from tests.kvpool.kept import kept_tokens
from tests.model.paging import PagedSequences

BLOCK = 4
BUDGET, SLACK = 12, 16
PROMPT = np.random.default_rng(3).integers(3, VOCAB, 80).tolist()
OTHER = np.random.default_rng(4).integers(3, VOCAB, 80).tolist()


# Backends, on random batches.


@dataclass
class Batch:
    """A step of sequences with these numbers of queries and keys, some of them observed."""

    rows: list[tuple[int, int, bool]]
    kv_heads: int
    group: int
    has_sink: bool
    block_size: int
    seed: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    row = st.tuples(st.sampled_from([1, 1, 1, 2, 6]), st.integers(0, 30), st.booleans())
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 3)]))
    return Batch(
        rows=[(queries, queries + more, seen) for queries, more, seen in draw(st.lists(row, min_size=1, max_size=5))],
        kv_heads=kv_heads,
        group=group,
        has_sink=draw(st.booleans()),
        block_size=draw(st.sampled_from([1, 4])),
        seed=draw(st.integers(0, 2**31)),
    )


def scores_of(batch: Batch, backend: str, cache_dtype: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A layer's scores, [kv_heads, slots], after a step that began with scores of 7; and what they should be."""
    spec = LayerSpec(1, batch.kv_heads * batch.group, batch.kv_heads, 8, 8, 0.4, has_sink=batch.has_sink)
    size, generator = batch.block_size, torch.Generator().manual_seed(batch.seed)
    needed = [-(-keys // size) for _, keys, _ in batch.rows]
    blocks = np.random.default_rng(batch.seed).permutation(np.arange(1, sum(needed) + 1))
    tables = np.zeros((len(needed), max(needed)), dtype=np.int32)
    for table, count, last in zip(tables, needed, np.cumsum(needed), strict=True):
        table[:count] = blocks[last - count : last]

    layout = CacheLayout((spec.layout,) * 2, CACHE_DTYPES[cache_dtype], size, scored=True)
    pool = KVTensors(layout, sum(needed) + 1, dtype, torch.device("cpu"))
    pool.fill_(float("nan"))
    assert pool.scores is not None
    pool.scores[1].fill_(7.0)
    expected = pool.scores[1].double()
    sink = torch.randn(spec.num_heads, generator=generator).to(dtype) if batch.has_sink else None
    starts = np.cumsum([0, *(queries for queries, _, _ in batch.rows)], dtype=np.int32)
    query = torch.randn(int(starts[-1]), spec.num_heads, 8, generator=generator).to(dtype)
    own = torch.zeros(2, batch.kv_heads, len(query), 8, dtype=dtype)
    slots = torch.zeros(len(query), dtype=torch.int64)
    for row, (table, (queries, keys, observed)) in enumerate(zip(tables, batch.rows, strict=True)):
        index = np.arange(keys)
        at = torch.from_numpy(table[index // size].astype(np.int64) * size + index % size)
        rows = torch.randn(2, batch.kv_heads, keys, 8, generator=generator).to(dtype)
        stored = torch.stack(pool.write(1, at, rows[0], rows[1]))
        mine = slice(int(starts[row]), int(starts[row + 1]))
        own[:, :, mine], slots[mine] = stored[:, :, -queries:], at[-queries:]
        for i in range(queries if observed else 0):
            seen = keys - queries + i + 1
            for head in range(spec.num_heads):
                of = head // batch.group
                weights = (stored[0, of, :seen].double() @ query[mine][i, head].double() * spec.scale).exp()
                total = weights.sum() + (0.0 if sink is None else sink[head].double().exp())
                expected[of, at[:seen]] += weights / total
    step = StepMetadata(
        pool=pool,
        slots=slots,
        positions=slots,
        context_lens=torch.tensor([keys for _, keys, _ in batch.rows]),
        block_tables=torch.from_numpy(tables.astype(np.int64)),
        query_starts=starts,
        host_context_lens=np.array([keys for _, keys, _ in batch.rows], dtype=np.int32),
        host_block_tables=tables,
        observed=np.array([observed for _, _, observed in batch.rows]),
    )
    with torch.inference_mode():
        select_backends(backend, (spec,), torch.device("cpu"))[0].attend(query, own[0], own[1], sink, spec, step)
    return pool.scores[1], expected


@settings(max_examples=60, deadline=None)
@given(
    batches(), st.sampled_from(["reference", "cpu"]), st.sampled_from(["float32", "int8"]), st.sampled_from([0, 100])
)
def test_keys_of_observed_rows_receive_the_columns(batch: Batch, backend: str, stored: str, dense_group: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model.attention.cpu, "DENSE_GROUP", dense_group)
        patch.setattr(server.model.attention.reference, "MAX_SCORES", 100)
        actual, expected = scores_of(batch, backend, stored, torch.float32)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(actual == 7.0, expected == 7.0), "keys that nobody observed received something"


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from(["reference", "cpu"]))
def test_half_precision(batch: Batch, backend: str) -> None:
    actual, expected = scores_of(batch, backend, "bfloat16", torch.bfloat16)
    torch.testing.assert_close(actual.double(), expected, atol=0.05, rtol=0.02)


# Whole models.

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {"layer_types": ["full_attention"] * 3},
    "deepseek_v3": {},
}


def column_sums(model: nn.Module, tokens: Sequence[int], kv_heads: int) -> list[Tensor]:
    """For each layer what keys receive in an unmodified model: [kv_heads, n], over all queries of a head's group."""
    with torch.inference_mode():
        attentions = model(torch.tensor([tokens]), output_attentions=True, use_cache=False).attentions
    return [weights[0].unflatten(0, (kv_heads, -1)).sum((1, 2)) for weights in attentions]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_add_up_over_chunks_and_decodes(name: str, backend: str) -> None:
    runner = ModelRunner(tiny_model(name, **MODELS[name]), backend, BLOCK, scored=True)
    runner.allocate(30)
    runner.pool.fill_(float("nan"))
    sequences = [PROMPT[:30], OTHER[:20], PROMPT[40:65]]
    paged = PagedSequences(sequences, 30, BLOCK)
    slots: list[list[int]] = [[], [], []]
    for sizes in ([9, 1, 7], [1, 8, 1], [1, 1, 1], [12, 1, 1], *[[1, 1, 1]] * 15):
        plan, parts = paged.plan(sizes)
        observed = np.array([sequence != 1 for sequence, _, _ in parts])
        runner.compute_logits(replace(plan, observed=observed if observed.any() else None))
        for (sequence, _, size), start in zip(parts, plan.query_starts.tolist(), strict=False):
            slots[sequence] += plan.slots[0, start : start + size].tolist()
    scores = runner.pool.scores
    assert scores is not None
    assert paged.done == [30, 20, 25]
    plain = tiny_model(name, **MODELS[name])
    for sequence in (0, 2):
        sums = column_sums(plain, sequences[sequence], len(scores[0]))
        for actual, expected in zip(scores, sums, strict=True):
            torch.testing.assert_close(actual[:, slots[sequence]], expected, atol=1e-4, rtol=1e-4)
    for actual in scores:
        assert actual[:, slots[1]].isnan().all(), "a sequence that nobody observed has scores"


# Sequences with a budget.


class Budgeted:
    """A sequence that gives up all but BUDGET tokens whenever it holds BUDGET + SLACK and has more to compute."""

    def __init__(self, tokens: list[int], blocks: Iterator[int], policy: EvictionPolicy) -> None:
        self.tokens = tokens
        self.policy = policy
        self.done = self.held = 0
        self.table: list[int] = []
        self._blocks = blocks

    def compaction(self) -> Compaction | None:
        """The one that is due before the next step; the blocks behind what is kept go, and others come."""
        if self.held < BUDGET + SLACK:
            return None
        table = np.array(self.table, dtype=np.int32)
        self.held = BUDGET
        self.table = self.table[: BUDGET // BLOCK]
        return Compaction(table, BUDGET + SLACK, BUDGET, 2, BUDGET // 2, self.policy)

    def chunk(self, size: int) -> tuple[list[int], int, list[list[int]]]:
        size = min(size, BUDGET + SLACK - self.held)
        start, ids = self.held, self.tokens[self.done : self.done + size]
        self.held += len(ids)
        self.done += len(ids)
        while len(self.table) * BLOCK < self.held:
            self.table.append(next(self._blocks))
        return ids, start, [list(self.table)]


def shuffled_blocks(num_blocks: int) -> Iterator[int]:
    return iter(np.random.default_rng(0).permutation(np.arange(1, num_blocks)).tolist())


def scored_everywhere(plan: StepPlan, targets: list[int]) -> StepPlan:
    """The plan, asking for the log-probability of a target after every token."""
    nothing = np.zeros(len(targets), dtype=np.int64)
    rows = np.repeat(np.arange(plan.num_sequences), np.diff(plan.query_starts)).astype(np.int32)
    return replace(plan, score_targets=np.array(targets), score_tops=nothing, score_rows=rows)


def step_of(runner: ModelRunner, sequence: Budgeted, size: int) -> StepResult:
    compaction = sequence.compaction()
    first = sequence.done
    plan = pack([sequence.chunk(size)], BLOCK)
    plan = replace(
        plan,
        positions=np.arange(first, sequence.done),
        observed=np.array([sequence.policy == "h2o"]),
        compactions=() if compaction is None else (compaction,),
    )
    return runner.run(scored_everywhere(plan, sequence.tokens[first + 1 : sequence.done + 1]))


class Simulation:
    """A model whose heads each have a list of the tokens they still hold: [key, value, attention received]."""

    def __init__(self, name: str) -> None:
        AttentionInterface.register("simulated_budget", self._attend)
        self.model = tiny_model(name, **MODELS[name])
        self.model.set_attn_implementation("simulated_budget")
        self.heads: dict[tuple[int, int], list[list[Tensor]]] = {}

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **rest: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        sinks = rest.get("s_aux")
        group = query.shape[1] // key.shape[1]
        out = torch.empty(1, query.shape[2], query.shape[1], value.shape[3])
        for i in range(query.shape[2]):
            for kv_head in range(key.shape[1]):
                tokens = self.heads.setdefault((module.layer_idx, kv_head), [])
                tokens.append([key[0, kv_head, i], value[0, kv_head, i], torch.zeros(())])
                for head in range(kv_head * group, (kv_head + 1) * group):
                    exps = [math.exp(float(query[0, head, i] @ token[0]) * scaling) for token in tokens]
                    total = sum(exps) + (0.0 if sinks is None else math.exp(float(sinks[head])))
                    out[0, i, head] = sum(
                        (e / total * token[1] for e, token in zip(exps, tokens, strict=True)), torch.zeros(1)
                    )
                    for e, token in zip(exps, tokens, strict=True):
                        token[2] = token[2] + e / total
        return out, None

    def evict(self, compaction: Compaction) -> None:
        for place, tokens in self.heads.items():
            kept = kept_tokens([float(token[2]) for token in tokens], compaction)
            self.heads[place] = [tokens[index] for index in kept]

    def logprobs(self, ids: list[int], first: int, targets: list[int]) -> list[float]:
        """Of each target after its token, the tokens at positions from `first` on."""
        positions = torch.arange(first, first + len(ids))
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), position_ids=positions[None], use_cache=False).logits[0]
        logprobs: list[float] = logits.log_softmax(-1)[torch.arange(len(ids)), targets].tolist()
        return logprobs


@pytest.mark.parametrize("policy", ["h2o", "window"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_what_follows_a_compaction_is_attention_to_what_was_kept(
    name: str, backend: str, policy: EvictionPolicy
) -> None:
    runner = ModelRunner(tiny_model(name, **MODELS[name]), backend, BLOCK, scored=True)
    runner.allocate(40)
    runner.pool.fill_(float("nan"))
    sequence, simulation = Budgeted(PROMPT, shuffled_blocks(40), policy), Simulation(name)
    compactions = 0
    for size in (10, 30, 6, 1, 1, 30, 1, 1, 5):
        first = sequence.done
        due = sequence.held == BUDGET + SLACK
        if due:
            compactions += 1
            simulation.evict(Compaction(np.empty(0, np.int32), BUDGET + SLACK, BUDGET, 2, BUDGET // 2, policy))
        result = step_of(runner, sequence, size)
        assert not due or result.compaction_seconds > 5e-5
        expected = simulation.logprobs(PROMPT[first : sequence.done], first, PROMPT[first + 1 : sequence.done + 1])
        assert [score.logprob for score in result.scores] == pytest.approx(expected, abs=1e-3)
        slots = [sequence.table[i // BLOCK] * BLOCK + i % BLOCK for i in range(sequence.held)]
        for (layer, head), tokens in simulation.heads.items():
            keys = torch.stack([token[0] for token in tokens])
            torch.testing.assert_close(runner.pool.flat_keys(layer)[head, slots], keys, atol=1e-4, rtol=1e-3)
            if policy == "h2o":
                assert runner.pool.scores is not None
                received = torch.stack([token[2] for token in tokens])
                torch.testing.assert_close(runner.pool.scores[layer][head, slots], received, atol=1e-3, rtol=1e-3)
    assert compactions == 2


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_the_kept_tokens_are_those_with_the_most_attention_in_the_unmodified_model(name: str, backend: str) -> None:
    runner = ModelRunner(tiny_model(name, **MODELS[name]), backend, BLOCK, scored=True)
    runner.allocate(20)
    sequence = Budgeted(PROMPT, shuffled_blocks(20), "h2o")
    while sequence.held < BUDGET + SLACK:
        step_of(runner, sequence, 9)
    slots = torch.tensor([sequence.table[i // BLOCK] * BLOCK + i % BLOCK for i in range(sequence.held)])
    before = [runner.pool.read(layer, slots)[0] for layer in range(3)]
    compaction = sequence.compaction()
    assert compaction is not None
    plan = replace(pack([sequence.chunk(1)], BLOCK), compactions=(compaction,))
    runner.run(scored_everywhere(plan, [0]))
    sums = column_sums(tiny_model(name, **MODELS[name]), PROMPT[: BUDGET + SLACK], len(before[0]))
    for layer, (old, received) in enumerate(zip(before, sums, strict=True)):
        new = runner.pool.read(layer, slots[:BUDGET])[0]
        for head in range(len(old)):
            kept = [int((old[head] == key).all(-1).nonzero().item()) for key in new[head]]
            assert kept == kept_tokens(received[head].tolist(), compaction)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_compaction_leaves_the_neighbours_as_they_are(backend: str) -> None:
    """To the last bit: their results, keys, values and scores."""
    runner = ModelRunner(tiny_model("llama"), backend, BLOCK, scored=True)
    table = list(range(21, 40))
    theirs = torch.arange(21 * BLOCK, 21 * BLOCK + 71)
    seen = []
    for compacts in (True, False):
        runner.allocate(40)
        sequence = Budgeted(PROMPT, shuffled_blocks(20), "h2o")
        while sequence.held < BUDGET + SLACK:
            plan = pack(
                [(OTHER[sequence.held : sequence.held + 14], sequence.held, [table]), sequence.chunk(14)], BLOCK
            )
            runner.compute_logits(replace(plan, observed=np.array([True, True])))
        runner.compute_logits(replace(pack([(OTHER[28:70], 28, [table])], BLOCK), observed=np.array([True])))
        compaction = sequence.compaction() if compacts else None
        start = sequence.held
        plan = replace(
            pack([([PROMPT[28]], start, [[*sequence.table, 20]]), (OTHER[70:71], 70, [table])], BLOCK),
            positions=np.array([28, 70]),
            observed=np.array([True, True]),
            compactions=() if compaction is None else (compaction,),
        )
        result = runner.run(scored_everywhere(plan, [5, 5]))
        assert runner.pool.scores is not None
        layers = [(*runner.pool.read(layer, theirs), runner.pool.scores[layer][:, theirs]) for layer in range(3)]
        seen.append((result.scores, layers))
    (with_it, held), (without, expected) = seen
    assert with_it[0] != without[0], "the compaction changed nothing"
    assert with_it[1] == without[1]
    for actual, wanted in zip(held, expected, strict=True):
        for one, other in zip(actual, wanted, strict=True):
            assert torch.equal(one, other)
