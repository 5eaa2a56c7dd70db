"""Attention on a CPU, reading the pool in place.

Rows with one query, most of a busy server's, are computed together as sparse matrices: a row of queries times keys has
entries only at the slots that the query sees, and those weights times the values are bags of embeddings. Torch has
both products, parallel over rows and free to look anywhere in the pool, so the block tables need not be contiguous and
a layer costs a handful of calls however many sequences there are. Their inner products are taken one by one, which
stops paying when many query heads share a KV head. Where the pool stores other numbers than the model computes with,
"in place" is what `server.model.attention.unpacked` lays out of it.

All else goes to torch's flash kernel, a call for each run of consecutive blocks. The kernel returns the log-sum-exp of
its scores beside its output, so runs are merged exactly (the reduction of FlashAttention, arXiv:2205.14135, section
3.1). Query heads that share a KV head are the kernel's queries for that head, so keys and values are never repeated.

The flash kernel keeps its weights to itself, so rows whose attention is observed are left to the reference where they
are not sparse. Their context is bounded by the budget for which they are observed.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from server.kvpool.tensors import KVTensors
from server.model.attention.metadata import Bucket, StepMetadata, make_buckets
from server.model.attention.reference import attend_row, hidden_keys
from server.model.attention.scores import add_scores, score_places
from server.model.attention.unpacked import unpacked_step
from server.model.spec import LayerSpec
from server.step import Int32Array, Int64Array

# Queries of a KV head from which the flash kernel's matrix products win over one inner product after another.
DENSE_GROUP = 12
# Rows are padded to the longest of those at least this share of its length.
FILL = 0.8
# Runs of an earlier context beyond which a prompt's keys are gathered first: each run costs an output of its own.
MOST_RUNS = 4

Run = tuple[int, int]  # first slot, number of slots
Views = list[tuple[Tensor, Tensor]]  # for each layer: keys [1, kv_heads, length, dim], values


@dataclass(frozen=True, slots=True, eq=False)
class _SparseRows:
    """Single-query rows as the rows of sparse matrices, one for each row and head.

    queries: [n], packed tokens of the rows, in the matrices' order.
    scores: CSR [n * heads, kv_heads * slots]. columns, starts: its indices and row pointers.
    weights: [nnz], the softmax of the scores' values.
    parts: for rows padded to one width, views [rows, heads, width] of scores' values and of weights, and the padding
        [rows, 1, width].
    observed: for each part the rows that are observed, and the places of their keys' scores [kv_heads, rows, width],
        flattened; None when there are none.
    """

    queries: Tensor
    scores: Tensor
    columns: Tensor
    starts: Tensor
    weights: Tensor
    parts: list[tuple[Tensor, Tensor, Tensor]]
    observed: list[tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, slots=True, eq=False)
class _RunRows:
    """Single-query rows as the views of their runs. queries: [n], their packed tokens."""

    queries: Tensor
    runs: list[list[Views]]


@dataclass(frozen=True, slots=True, eq=False)
class _PromptRow:
    """A row of several queries, packed tokens [begin, end), and the keys they see.

    runs, slots: the keys before this step's own, as views of their runs or as slots to gather.
    mask: additive, [n, len(slots)], if not every query sees all of them; `slots` then include the step's own.
    """

    begin: int
    end: int
    runs: list[Views]
    slots: Tensor | None = None
    mask: Tensor | None = None


class CpuBackend:
    """Float32, bfloat16 or float16; keys and values of one width; no soft-cap (the kernel has none)."""

    name = "cpu"

    def __init__(self) -> None:
        self._flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            torch.eye(1).to_sparse_csr()  # torch says so once in a process, from here on not to an operator

    def supports(self, spec: LayerSpec, device: torch.device) -> bool:
        return device.type == "cpu" and spec.softcap is None and spec.key_dim == spec.value_dim

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, spec: LayerSpec, step: StepMetadata
    ) -> Tensor:
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        stored, step = step, unpacked_step(step, spec)
        shape = (spec.visibility, spec.num_heads, spec.num_kv_heads)
        is_sparse = spec.num_heads < DENSE_GROUP * spec.num_kv_heads and query.dtype == torch.float32
        if is_sparse:
            sparse = step.once(("cpu-sparse", shape), lambda: _plan_sparse(step, stored, spec))
            if sparse is not None:
                self._attend_sparse(query, sink, spec, step.pool, stored.pool, sparse, out)
        else:
            decodes = step.once(("cpu-runs", shape), lambda: _plan_runs(step, spec))
            if decodes.runs:
                self._attend_runs(query, sink, spec, decodes, out)
        for row in step.once(("cpu-prompts", shape), lambda: _plan_prompts(step, spec)):
            self._attend_prompt(query, key, value, sink, spec, step, row, out)
        if step.observed is not None:
            grouped = query.unflatten(1, (spec.num_kv_heads, -1)).transpose(0, 1)
            left = step.observed & (step.query_lens > 1) if is_sparse else step.observed
            for observed in np.flatnonzero(left).tolist():
                attend_row(observed, grouped, sink, spec, stored, out)
        return out

    def _attend_sparse(
        self,
        query: Tensor,
        sink: Tensor | None,
        spec: LayerSpec,
        pool: KVTensors,
        scored: KVTensors,
        rows: _SparseRows,
        out: Tensor,
    ) -> None:
        keys = pool.flat_keys(spec.layer_idx).flatten(0, 1)
        values = pool.flat_values(spec.layer_idx).flatten(0, 1)
        chosen = query.index_select(0, rows.queries).flatten(0, 1)
        # With beta = 0 the old values still enter as 0 * value. They are this row's own: its score in another layer,
        # or -inf where it is padded, which becomes NaN and is masked again.
        torch.sparse.sampled_addmm(rows.scores, chosen, keys.t(), beta=0.0, alpha=spec.scale, out=rows.scores)
        strengths = []
        for (scores, weights, padding), observed in zip(rows.parts, rows.observed, strict=True):
            scores.masked_fill_(padding, -math.inf)
            torch.softmax(scores, -1, out=weights)
            if sink is not None:
                strengths.append(torch.sigmoid(scores.logsumexp(-1) - sink))
            if observed is not None:
                members, places = observed
                received = weights.index_select(0, members)
                if sink is not None:
                    received *= strengths[-1].index_select(0, members)[..., None]
                by_group = received.unflatten(1, (spec.num_kv_heads, -1))
                add_scores(scored, spec.layer_idx, places, by_group.sum(2).transpose(0, 1))
        mixed = F.embedding_bag(
            rows.columns, values, rows.starts, mode="sum", per_sample_weights=rows.weights, include_last_offset=True
        ).view(-1, spec.num_heads, spec.value_dim)
        if sink is not None:
            mixed = mixed * torch.cat(strengths)[..., None]
        out.index_copy_(0, rows.queries, mixed)

    def _attend_runs(self, query: Tensor, sink: Tensor | None, spec: LayerSpec, rows: _RunRows, out: Tensor) -> None:
        grouped = query.index_select(0, rows.queries).view(len(rows.runs), 1, spec.num_kv_heads, -1, spec.key_dim)
        parts = []
        for q, runs in zip(grouped.unbind(0), rows.runs, strict=True):
            done = [self._flash(q, *run[spec.layer_idx], 0.0, False, scale=spec.scale) for run in runs]
            parts.append(_merge(done) if len(done) > 1 else done[0])
        mixed = torch.cat([output for output, _ in parts])
        if sink is not None:
            lse = torch.cat([lse for _, lse in parts])
            strength = torch.sigmoid(lse - sink.float().view(1, spec.num_kv_heads, -1))
            mixed = mixed * strength[..., None].to(mixed.dtype)
        out.index_copy_(0, rows.queries, mixed.flatten(1, 2))

    def _attend_prompt(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        spec: LayerSpec,
        step: StepMetadata,
        row: _PromptRow,
        out: Tensor,
    ) -> None:
        group = spec.num_heads // spec.num_kv_heads
        # KV heads take the batch's place: [kv_heads, group, n, dim]; keys and values have stride 0 over the group.
        q = query[row.begin : row.end].unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3)
        earlier = [run[spec.layer_idx] for run in row.runs]
        if row.slots is not None:
            k = self._gather("keys", step.pool.flat_keys(spec.layer_idx), row.slots)
            v = self._gather("values", step.pool.flat_values(spec.layer_idx), row.slots)
            earlier = [(k[None], v[None])]
        parts = []
        if row.mask is None:
            own_k = key[:, None, row.begin : row.end].expand(-1, group, -1, -1)
            own_v = value[:, None, row.begin : row.end].expand(-1, group, -1, -1)
            parts.append(self._flash(q, own_k, own_v, 0.0, True, scale=spec.scale))
        for k, v in earlier:
            k, v = (tensor.transpose(0, 1).expand(-1, group, -1, -1) for tensor in (k, v))
            parts.append(self._flash(q, k, v, 0.0, False, attn_mask=row.mask, scale=spec.scale))
        mixed, lse = _merge(parts) if len(parts) > 1 else parts[0]
        if sink is not None:
            strength = torch.sigmoid(lse - sink.float().view(spec.num_kv_heads, group, 1))
            mixed = mixed * strength[..., None].to(mixed.dtype)
        out[row.begin : row.end] = mixed.permute(2, 0, 1, 3).flatten(1, 2)

    def _gather(self, use: str, source: Tensor, slots: Tensor) -> Tensor:
        """source[:, slots] in reused memory: [kv_heads, len(slots), dim], valid until the next gather for this use."""
        shape = (source.shape[0], len(slots), source.shape[2])
        size = math.prod(shape)
        scratch = self._scratch.get((use, source.dtype))
        if scratch is None or len(scratch) < size:
            scratch = self._scratch[use, source.dtype] = source.new_empty(size)
        target = scratch[:size].view(shape)
        torch.index_select(source, 1, slots, out=target)
        return target


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets from (output [.., n, dim], log-sum-exp [.., n]) of each."""
    outputs = torch.stack([output for output, _ in parts])
    lses = torch.stack([lse for _, lse in parts])
    total = lses.logsumexp(0)
    weights = (lses - total).exp_().unsqueeze(-1)
    return (outputs * weights).sum(0).to(outputs.dtype), total


def _plan_sparse(step: StepMetadata, stored: StepMetadata, spec: LayerSpec) -> _SparseRows | None:
    rows = np.flatnonzero(step.query_lens == 1)
    if not len(rows):
        return None
    heads, num_slots = spec.num_heads, step.pool.num_blocks * step.block_size
    if (step.host_context_lens[rows] - step.first_visible(rows, spec.visibility)).max() > num_slots:
        # torch would take so many entries in a row for an error of its own and write past its arrays.
        raise ValueError("a sequence sees more tokens than the pool has slots")
    index = torch.int32 if spec.num_kv_heads * num_slots < 2**31 else torch.int64
    # Row h * num_slots + slot of the flattened keys is what KV head h stores in a slot.
    offsets = torch.arange(spec.num_kv_heads, dtype=index).repeat_interleave(heads // spec.num_kv_heads) * num_slots
    buckets = make_buckets(step, rows, spec.visibility, sys.maxsize, FILL)
    columns = torch.cat([(b.slots.view(-1, 1, b.width).to(index) + offsets[:, None]).flatten() for b in buckets])
    widths = torch.cat([torch.full((len(bucket.rows) * heads,), bucket.width, dtype=index) for bucket in buckets])
    starts = F.pad(widths.cumsum(0, dtype=index), (1, 0))
    values, weights = torch.zeros(len(columns)), torch.empty(len(columns))
    sizes = [len(bucket.rows) * heads * bucket.width for bucket in buckets]
    parts = [
        (part.view(-1, heads, bucket.width), weight.view(-1, heads, bucket.width), bucket.padding[:, None])
        for part, weight, bucket in zip(values.split(sizes), weights.split(sizes), buckets, strict=True)
    ]
    scores = torch.sparse_csr_tensor(
        starts, columns, values, (len(rows) * heads, spec.num_kv_heads * num_slots), check_invariants=False
    )
    queries = torch.cat([bucket.queries for bucket in buckets])
    # Of the same lengths, so the same buckets; but with the slots whose scores they are.
    same = step is stored or step.observed is None
    scored = buckets if same else make_buckets(stored, rows, spec.visibility, sys.maxsize, FILL)
    observed = [_plan_observed(stored, spec, bucket) for bucket in scored]
    return _SparseRows(queries, scores, columns, starts, weights, parts, observed)


def _plan_observed(step: StepMetadata, spec: LayerSpec, bucket: Bucket) -> tuple[Tensor, Tensor] | None:
    if bucket.observed is None:
        return None
    slots = bucket.slots.view(bucket.padding.shape).index_select(0, bucket.observed)
    return bucket.observed, score_places(step.pool, spec.num_kv_heads, slots.flatten())


def _plan_runs(step: StepMetadata, spec: LayerSpec) -> _RunRows:
    rows = np.flatnonzero((step.query_lens == 1) & ~step.observed_rows)
    runs = _runs(step, rows, step.first_visible(rows, spec.visibility), step.host_context_lens[rows])
    queries = torch.from_numpy(step.query_starts[rows].astype(np.int64))
    return _RunRows(queries, [[step.pool.runs(*run) for run in pieces] for pieces in runs])


def _plan_prompts(step: StepMetadata, spec: LayerSpec) -> list[_PromptRow]:
    rows = np.flatnonzero((step.query_lens > 1) & ~step.observed_rows)
    context_lens = step.host_context_lens[rows]
    earlier_lens = context_lens - step.query_lens[rows]
    plans = []
    for row, context_len, pieces in zip(
        rows.tolist(), context_lens.tolist(), _runs(step, rows, np.zeros_like(rows), earlier_lens), strict=True
    ):
        begin, end = int(step.query_starts[row]), int(step.query_starts[row + 1])
        if spec.visibility.first(context_len - 1) > 0:
            plans.append(_masked_prompt(step, spec, row, begin, end))
        elif len(pieces) > MOST_RUNS:
            plans.append(_PromptRow(begin, end, [], step.slots_of(row, 0, context_len - (end - begin))))
        else:
            plans.append(_PromptRow(begin, end, [step.pool.runs(*run) for run in pieces]))
    return plans


def _masked_prompt(step: StepMetadata, spec: LayerSpec, row: int, begin: int, end: int) -> _PromptRow:
    context_len = int(step.host_context_lens[row])
    queries = range(context_len - (end - begin), context_len)
    first = spec.visibility.first(queries[0])
    hidden = hidden_keys(queries, first, spec, step.slots.device)
    dtype = step.pool.flat_keys(spec.layer_idx).dtype
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return _PromptRow(begin, end, [], step.slots_of(row, first, context_len), mask)


def _runs(
    step: StepMetadata, rows: Int64Array, first: Int64Array | Int32Array, stop: Int64Array | Int32Array
) -> list[list[Run]]:
    """For each row, the cache indices [first, stop) as runs of consecutive slots, in order."""
    size = step.block_size
    tables = step.host_block_tables[rows]
    follows = tables[:, 1:] == tables[:, :-1] + 1
    out: list[list[Run]] = []
    for table, joined, begin, end in zip(tables, follows, first.tolist(), stop.tolist(), strict=True):
        if begin >= end:
            out.append([])
            continue
        low, high = begin // size, -(-end // size)
        breaks = (np.flatnonzero(~joined[low : high - 1]) + low + 1).tolist()
        pieces = []
        for start, until in zip([low, *breaks], [*breaks, high], strict=True):
            a, b = max(begin, start * size), min(end, until * size)
            pieces.append((int(table[start]) * size + a - start * size, b - a))
        out.append(pieces)
    return out
