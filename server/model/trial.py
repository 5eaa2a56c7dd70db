"""Step plans made up by the runner itself: to check a model at load, and to measure its largest step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.step import History, SamplingParams, StepPlan

# Token ids, cache index of the first of them, block table for each group of layers.
Chunk = tuple[Sequence[int], int, Sequence[Sequence[int]]]


def pack(chunks: Sequence[Chunk], block_size: int, *, first_position: int | None = None) -> StepPlan:
    """A step that computes these chunks of different sequences and wants the logits of every token, but no sample.

    first_position: position of the first chunk's first token, where it is not its cache index.
    """
    widest = max(len(table) for _, _, of_groups in chunks for table in of_groups)
    tables = np.zeros((len(chunks[0][2]), len(chunks), widest), dtype=np.int32)
    ids: list[int] = []
    indices, slots = [], []
    for row, (tokens, start, of_groups) in enumerate(chunks):
        for group, table in enumerate(of_groups):
            tables[group, row, : len(table)] = table
        index = np.arange(start, start + len(tokens))
        ids += tokens
        indices.append(index)
        slots.append(tables[:, row, index // block_size].astype(np.int64) * block_size + index % block_size)
    positions = np.concatenate(indices)
    if first_position is not None:
        positions[: len(chunks[0][0])] += first_position - chunks[0][1]
    lengths = [len(tokens) for tokens, _, _ in chunks]
    nothing = np.empty(0, dtype=np.int64)
    return StepPlan(
        step=0,
        input_ids=np.array(ids, dtype=np.int64),
        positions=positions,
        slots=np.concatenate(slots, axis=1),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array([start + len(tokens) for tokens, start, _ in chunks], dtype=np.int32),
        block_tables=tables,
        logit_indices=np.arange(len(ids)),
        sample_rows=nothing.astype(np.int32),
        out_indices=nothing,
        params=(),
        histories=(),
        score_targets=nothing,
        score_tops=nothing,
        score_rows=nothing.astype(np.int32),
    )


def worst_step(
    max_tokens: int, max_seqs: int, logit_rows: int, max_model_len: int, block_size: int, num_groups: int
) -> StepPlan:
    """The step that takes the most memory within these limits. All its keys and values go to the trash block.

    As few sequences as possible, the last ones, compute prompt up to the longest context; the others decode. All
    samples use all that the sampler offers, and logits beyond one for each sequence are scored.
    """
    tokens = min(max_tokens, max_seqs * max_model_len)
    num_prompts = min(max_seqs, -(-max(0, tokens - max_seqs) // max(1, max_model_len - 1)))
    decodes = max_seqs - num_prompts
    left = tokens - decodes
    prompts = [min(max_model_len, left - index * max_model_len) for index in range(num_prompts)]
    lengths = np.array([1] * decodes + prompts, dtype=np.int64)
    # Backends bound what many long contexts take together; one long context they do not.
    contexts = np.array([min(max_model_len, 1024)] * decodes + [max_model_len] * len(prompts), dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, lengths, strict=True)])
    num_samples = min(max_seqs, logit_rows)
    num_scores = min(logit_rows - num_samples, tokens)
    everything = SamplingParams(top_p=0.9, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logprobs=20)
    history = History(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    return StepPlan(
        step=0,
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        slots=np.tile(positions % block_size, (num_groups, 1)),
        query_starts=starts.astype(np.int32),
        context_lens=contexts.astype(np.int32),
        block_tables=np.zeros((num_groups, len(lengths), -(-int(contexts.max()) // block_size)), dtype=np.int32),
        logit_indices=np.concatenate((starts[1 : num_samples + 1] - 1, np.arange(num_scores))),
        sample_rows=np.arange(num_samples, dtype=np.int32),
        out_indices=np.zeros(num_samples, dtype=np.int64),
        params=(everything,) * num_samples,
        histories=(history,) * num_samples,
        score_targets=np.zeros(num_scores, dtype=np.int64),
        score_tops=np.full(num_scores, 20, dtype=np.int64),
        score_rows=np.zeros(num_scores, dtype=np.int32),
        num_decodes=decodes,
    )
