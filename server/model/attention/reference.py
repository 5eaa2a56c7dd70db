"""Attention in plain torch: the oracle of the other backends, and the portable backend of any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from server.model.attention.metadata import Bucket, StepMetadata, make_buckets
from server.model.attention.scores import add_scores, score_places
from server.model.spec import LayerSpec
from server.step import Int64Array

# Bounds of the memory that one operation takes, whatever the batch: slots gathered at once, scores computed at once.
MAX_GATHERED = 2**16
MAX_SCORES = 2**26


class ReferenceBackend:
    """Gathers the visible keys and values of each sequence and computes softmax attention with float32 scores.

    Sequences with one query are computed together, padded to the longest of their bucket; the others one by one.
    """

    name = "reference"

    def supports(self, spec: LayerSpec, device: torch.device) -> bool:
        return True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, spec: LayerSpec, step: StepMetadata
    ) -> Tensor:
        grouped = query.unflatten(1, (spec.num_kv_heads, -1)).transpose(0, 1)  # [kv_heads, T, group, key_dim]
        out = value.new_empty(query.shape[0], spec.num_heads, spec.value_dim)
        buckets, rest = step.once(("reference", spec.visibility), lambda: _split(step, spec))
        for bucket in buckets:
            keys, values = step.pool.read(spec.layer_idx, bucket.slots)
            k, v = keys.unflatten(1, bucket.padding.shape), values.unflatten(1, bucket.padding.shape)
            q = grouped.index_select(1, bucket.queries)
            watched = bucket.observed is not None
            mixed, received = _softmax_attention(q, k, v, bucket.padding[None, :, None, :], sink, spec, watched)
            if received is not None and bucket.observed is not None:
                slots = bucket.slots.view(bucket.padding.shape).index_select(0, bucket.observed)
                places = score_places(step.pool, spec.num_kv_heads, slots.flatten())
                add_scores(step.pool, spec.layer_idx, places, received.index_select(1, bucket.observed))
            out.index_copy_(0, bucket.queries, mixed.transpose(0, 1).flatten(1, 2))
        for row in rest.tolist():
            attend_row(row, grouped, sink, spec, step, out)
        return out


def attend_row(
    row: int, grouped: Tensor, sink: Tensor | None, spec: LayerSpec, step: StepMetadata, out: Tensor
) -> None:
    """Attention of one sequence's queries, written to its tokens of out [T, H, value_dim].

    grouped: the step's queries [kv_heads, T, group, key_dim].
    """
    begin, end = int(step.query_starts[row]), int(step.query_starts[row + 1])
    context_len = int(step.host_context_lens[row])
    watched = step.observed is not None and bool(step.observed[row])
    at_once = max(1, MAX_SCORES // (spec.num_heads * context_len))
    for start in range(begin, end, at_once):
        stop = min(start + at_once, end)
        index = range(context_len - end + start, context_len - end + stop)
        first = spec.visibility.first(index[0])
        slots = step.slots_of(row, first, index[-1] + 1)
        hidden = hidden_keys(index, first, spec, step.slots.device)
        keys, values = step.pool.read(spec.layer_idx, slots)
        # One "batch" of n * group queries: [kv_heads, 1, n * group, key_dim].
        q = grouped[:, start:stop].flatten(1, 2)[:, None]
        group = spec.num_heads // spec.num_kv_heads
        hidden = hidden.repeat_interleave(group, 0)[None, None]
        mixed, received = _softmax_attention(q, keys[:, None], values[:, None], hidden, sink, spec, watched)
        if received is not None:
            add_scores(step.pool, spec.layer_idx, score_places(step.pool, spec.num_kv_heads, slots), received)
        out[start:stop] = mixed[:, 0].unflatten(1, (stop - start, group)).transpose(0, 1).flatten(1, 2)


def hidden_keys(queries: range, first: int, spec: LayerSpec, device: torch.device) -> Tensor:
    """[n, m], True where query i must not see key j, for queries and keys at these cache indices; keys start at `first`
    and end with the last query's own."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(first, queries.stop, device=device)[None]
    hidden = key > query
    if spec.window is not None:
        hidden |= key <= query - spec.window
    if spec.chunk is not None:
        hidden |= key // spec.chunk < query // spec.chunk
    return hidden


def _split(step: StepMetadata, spec: LayerSpec) -> tuple[list[Bucket], Int64Array]:
    single = step.query_lens == 1
    rows = np.flatnonzero(single)
    return make_buckets(step, rows, spec.visibility, MAX_GATHERED, fill=0.5), np.flatnonzero(~single)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, sink: Tensor | None, spec: LayerSpec, watched: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of q [kv_heads, B, queries, key_dim] over k, v [kv_heads, B, keys, dim] -> [kv_heads, B, queries, dim].

    Also returns, if `watched`, what each key received: the sum of its float32 weights [kv_heads, B, keys].

    `hidden` broadcasts to the scores [kv_heads, B, queries, keys]. The queries of a KV head are ordered with the heads
    of its group innermost.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores.masked_fill_(hidden, float("-inf"))
    if sink is None:
        weights = scores.softmax(-1)
    else:
        group = spec.num_heads // spec.num_kv_heads
        logits = sink.float().view(spec.num_kv_heads, 1, 1, group)
        column = logits.expand(-1, q.shape[1], q.shape[2] // group, -1).flatten(2)[..., None]
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(v.dtype), v), weights.sum(2) if watched else None
