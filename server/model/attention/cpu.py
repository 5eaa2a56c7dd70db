"""Attention on a CPU with torch's flash kernel, reading runs of consecutive blocks in place.

The kernel returns the log-sum-exp of its scores beside its output, so a context that lies in several runs is attended
run by run and merged exactly (the reduction of FlashAttention, arXiv:2205.14135, section 3.1). Query heads that share a
KV head are the kernel's queries for that head, so keys and values are never repeated.

What a call costs beside its work is about 15 us, so rows in many short pieces are instead gathered, several rows at
once, into scratch memory that is kept between steps: fresh memory of that size costs more than the copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.model.attention.metadata import Bucket, StepMetadata, make_buckets
from server.model.attention.reference import hidden_keys
from server.model.spec import LayerSpec
from server.step import Int32Array, Int64Array

# A row is read in place if its runs hold at least this many bytes of one layer's keys and values on average.
IN_PLACE_BYTES = 192 * 1024
# A bucket's keys, and its values, are gathered up to this size, which stays in the cache until they are read.
BUCKET_BYTES = 4 * 1024 * 1024
BUCKET_FILL = 0.75

Run = tuple[int, int]  # first slot, number of slots
Views = list[tuple[Tensor, Tensor]]  # for each layer: keys [1, kv_heads, length, dim], values


@dataclass(frozen=True, slots=True, eq=False)
class _DecodePlan:
    """Single-query rows: those read in place, with the views of their runs, and those gathered."""

    rows: list[list[Views]]
    queries: Tensor
    buckets: list[tuple[Bucket, Tensor]]  # with the additive mask [n, 1, group, width]


@dataclass(frozen=True, slots=True, eq=False)
class _PromptRow:
    """A row of several queries: packed tokens [begin, end), the last of them at cache index `context_len - 1`.

    earlier: the runs before this step's own tokens, if every query sees all of them; else `slots` and the additive
    `mask` [n, len(slots)] of all keys that some query sees.
    """

    begin: int
    end: int
    earlier: list[Views]
    slots: Tensor | None = None
    mask: Tensor | None = None


class CpuBackend:
    """Float32, bfloat16 or float16; keys and values of one width; no soft-cap (the kernel has none)."""

    name = "cpu"

    def __init__(self) -> None:
        self._flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    def supports(self, spec: LayerSpec, device: torch.device) -> bool:
        return device.type == "cpu" and spec.softcap is None and spec.key_dim == spec.value_dim

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, spec: LayerSpec, step: StepMetadata
    ) -> Tensor:
        out = query.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        geometry = (spec.visibility, spec.num_heads, spec.num_kv_heads, spec.key_dim)
        decodes = step.once(("cpu-decode", geometry), lambda: _plan_decodes(step, spec))
        prompts = step.once(("cpu-prompt", geometry), lambda: _plan_prompts(step, spec))
        if decodes.rows:
            self._attend_in_place(query, sink, spec, decodes, out)
        for bucket, mask in decodes.buckets:
            self._attend_bucket(query, sink, spec, step, bucket, mask, out)
        for row in prompts:
            self._attend_prompt(query, key, value, sink, spec, step, row, out)
        return out

    def _attend_in_place(
        self, query: Tensor, sink: Tensor | None, spec: LayerSpec, plan: _DecodePlan, out: Tensor
    ) -> None:
        everything = len(plan.rows) == query.shape[0]
        chosen = query if everything else query.index_select(0, plan.queries)
        grouped = chosen.unflatten(1, (spec.num_kv_heads, 1, -1)).transpose(1, 2).unbind(0)
        outputs, lses = [], []
        for q, runs in zip(grouped, plan.rows, strict=True):
            if len(runs) == 1:
                k, v = runs[0][spec.layer_idx]
                output, lse = self._flash(q, k, v, 0.0, False, scale=spec.scale)
            else:
                output, lse = _merge(
                    [self._flash(q, *run[spec.layer_idx], 0.0, False, scale=spec.scale) for run in runs]
                )
            outputs.append(output)
            lses.append(lse)
        mixed = torch.cat(outputs)
        if sink is not None:
            mixed = _apply_sink(mixed, torch.cat(lses), sink, spec)
        if everything:
            out.copy_(mixed.flatten(1, 2))
        else:
            out.index_copy_(0, plan.queries, mixed.flatten(1, 2))

    def _attend_bucket(
        self,
        query: Tensor,
        sink: Tensor | None,
        spec: LayerSpec,
        step: StepMetadata,
        bucket: Bucket,
        mask: Tensor,
        out: Tensor,
    ) -> None:
        k = self._gather("keys", step.pool.flat_keys(spec.layer_idx), bucket.slots)
        v = self._gather("values", step.pool.flat_values(spec.layer_idx), bucket.slots)
        q = query.index_select(0, bucket.queries).unflatten(1, (spec.num_kv_heads, -1))
        rows = len(bucket.rows)
        mixed, lse = self._flash(
            q,
            k.unflatten(1, (rows, -1)).transpose(0, 1),
            v.unflatten(1, (rows, -1)).transpose(0, 1),
            0.0,
            False,
            attn_mask=mask,
            scale=spec.scale,
        )
        if sink is not None:
            mixed = _apply_sink(mixed, lse, sink, spec)
        out.index_copy_(0, bucket.queries, mixed.flatten(1, 2))

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
        if row.slots is not None:
            k = self._gather("keys", step.pool.flat_keys(spec.layer_idx), row.slots)[:, None]
            v = self._gather("values", step.pool.flat_values(spec.layer_idx), row.slots)[:, None]
            mixed, lse = self._flash(
                q,
                k.expand(-1, group, -1, -1),
                v.expand(-1, group, -1, -1),
                0.0,
                False,
                attn_mask=row.mask,
                scale=spec.scale,
            )
        else:
            own_k = key[:, None, row.begin : row.end].expand(-1, group, -1, -1)
            own_v = value[:, None, row.begin : row.end].expand(-1, group, -1, -1)
            parts = [self._flash(q, own_k, own_v, 0.0, True, scale=spec.scale)]
            for run in row.earlier:
                k, v = (tensor.transpose(0, 1).expand(-1, group, -1, -1) for tensor in run[spec.layer_idx])
                parts.append(self._flash(q, k, v, 0.0, False, scale=spec.scale))
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


def _apply_sink(mixed: Tensor, lse: Tensor, sink: Tensor, spec: LayerSpec) -> Tensor:
    """Scale mixed [rows, kv_heads, group, dim] by the share of the softmax that the sinks leave to the keys."""
    strength = torch.sigmoid(lse - sink.float().view(1, spec.num_kv_heads, -1))
    return mixed * strength[..., None].to(mixed.dtype)


def _plan_decodes(step: StepMetadata, spec: LayerSpec) -> _DecodePlan:
    rows = np.flatnonzero(step.query_lens == 1)
    runs = _runs(step, rows, step.first_visible(rows, spec.visibility), step.host_context_lens[rows])
    slot_bytes = spec.layout.elements_per_token * step.pool.flat_keys(spec.layer_idx).element_size()
    in_place = np.array(
        [sum(length for _, length in pieces) * slot_bytes >= len(pieces) * IN_PLACE_BYTES for pieces in runs],
        dtype=bool,
    )
    views = [
        [step.pool.runs(*run) for run in pieces] for pieces, keep in zip(runs, in_place.tolist(), strict=True) if keep
    ]
    max_slots = 2 * BUCKET_BYTES // slot_bytes
    dtype = step.pool.flat_keys(spec.layer_idx).dtype
    buckets = []
    for bucket in make_buckets(step, rows[~in_place], spec.visibility, max_slots, BUCKET_FILL):
        mask = torch.zeros(bucket.padding.shape, dtype=dtype).masked_fill_(bucket.padding, float("-inf"))
        group = spec.num_heads // spec.num_kv_heads
        buckets.append((bucket, mask[:, None, None].expand(-1, 1, group, -1)))
    return _DecodePlan(views, torch.from_numpy(step.query_starts[rows[in_place]].astype(np.int64)), buckets)


def _plan_prompts(step: StepMetadata, spec: LayerSpec) -> list[_PromptRow]:
    rows = np.flatnonzero(step.query_lens > 1)
    context_lens = step.host_context_lens[rows]
    earlier_lens = context_lens - step.query_lens[rows]
    limited = np.array([spec.visibility.first(length - 1) > 0 for length in context_lens.tolist()], dtype=bool)
    runs = _runs(step, rows, np.zeros_like(earlier_lens), np.where(limited, 0, earlier_lens))
    plans = []
    for row, pieces, masked in zip(rows.tolist(), runs, limited.tolist(), strict=True):
        begin, end = int(step.query_starts[row]), int(step.query_starts[row + 1])
        if masked:
            plans.append(_masked_prompt(step, spec, row, begin, end))
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
