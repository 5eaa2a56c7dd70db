"""Does the runner compute what the unmodified model computes? On any device, in float32 and bfloat16.

Three sequences go through `ModelRunner` in chunks of mixed prefill and decode, over shuffled blocks of a pool full of
NaN; at every position the log-probabilities of the whole vocabulary are compared with those of Hugging Face's eager
forward pass over the whole sequence.

float32: none may differ by more than 1e-4 (TF32 is off), of log-probabilities that spread over several units.

bfloat16: its steps are 2^-8 of a value, so no fixed bound says what is right. Both the runner and the eager model in
bfloat16 are compared with the eager model in float32 on the same (rounded) weights, and the runner's error may be 1.5
times the eager model's own: both round as often, in another order (measured on a CPU: 0.88 to 1.12 times). The error is
the root mean square over vocabulary and positions; in models with experts, where rounding may send single tokens to
another expert on either side, it is the median over the positions.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from loadtest.architectures import ROUTED, VOCAB, tiny_model
from server.model.runner import ModelRunner
from server.step import SamplingParams, StepPlan

LENGTHS = (23, 9, 14)
CHUNKS = ((10, 6, 5), (6, 1, 4), (4, 1, 1), (1, 1, 1), (1, 0, 1), (1, 0, 1), (0, 0, 1))
BLOCK_SIZE = 4
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Outcome:
    """One model in one dtype. `error` must not exceed `tolerance`; both None where nothing could be computed."""

    model: str
    dtype: str
    error: float | None
    tolerance: float | None
    ok: bool
    seconds: float
    note: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def run_matrix(
    names: Sequence[str], device: str, backend: str, seed: int, show: Callable[[str], None]
) -> list[Outcome]:
    """All models in both dtypes."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    outcomes = []
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            show(f"{name} in {_name(dtype)}")
            outcomes.append(check(name, dtype, device, backend, seed))
    return outcomes


def check(name: str, dtype: torch.dtype, device: str, backend: str, seed: int) -> Outcome:
    """Compare one model in one dtype. Whatever goes wrong is an outcome that is not ok, with its reason."""
    start = time.perf_counter()
    error = tolerance = None
    note = ""
    try:
        error, tolerance = _compare(tiny_model(name, seed), name, dtype, device, backend, seed)
    except KeyError:
        note = "this transformers does not know it"
    except Exception as failure:
        note = f"{type(failure).__name__}: {failure}"
    ok = error is not None and tolerance is not None and error <= tolerance  # a NaN is not
    return Outcome(name, _name(dtype), error, tolerance, ok, time.perf_counter() - start, note)


def _compare(
    model: PreTrainedModel, name: str, dtype: torch.dtype, device: str, backend: str, seed: int
) -> tuple[float, float]:
    _move(model, torch.device(device), dtype)
    draw = random.Random(seed)
    sequences = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    eager = [_eager(model, tokens) for tokens in sequences]
    served = _served(copy.deepcopy(model), sequences, backend, seed)
    if dtype == torch.float32:
        return max(_largest(a - b) for a, b in zip(served, eager, strict=True)), FLOAT32_TOLERANCE
    _move(model, torch.device(device), torch.float32)
    exact = [_eager(model, tokens) for tokens in sequences]
    size = _median_error if name in ROUTED else _rms_error
    return size(served, exact), BFLOAT16_FACTOR * size(eager, exact)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    module.to(device=device, dtype=dtype)


@torch.inference_mode()
def _eager(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[T, V] log-probabilities of the unmodified model, in double precision on the CPU."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    return logits[0].double().log_softmax(-1).cpu()


def _served(model: PreTrainedModel, sequences: list[list[int]], backend: str, seed: int) -> list[torch.Tensor]:
    """[T, V] log-probabilities of each sequence through the runner, in double precision on the CPU."""
    runner = ModelRunner(model, backend, BLOCK_SIZE)
    blocks_each = [-(-len(tokens) // BLOCK_SIZE) for tokens in sequences]
    groups = len(runner.layout.groups)
    num_blocks = 1 + groups * sum(blocks_each) + 3
    runner.allocate(num_blocks)
    runner.pool.fill_(float("nan"))
    blocks = list(range(1, num_blocks))
    random.Random(seed).shuffle(blocks)
    tables = [[[blocks.pop() for _ in range(count)] for count in blocks_each] for _ in range(groups)]
    result = [torch.full((len(tokens), VOCAB), float("nan"), dtype=torch.float64) for tokens in sequences]
    for plan, places in plans(sequences, tables):
        scores = runner.run(plan).scores
        for (sequence, position), score in zip(places, scores, strict=True):
            for token, logprob in score.top:
                result[sequence][position, token] = logprob
    return result


def plans(
    sequences: Sequence[Sequence[int]], tables: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[StepPlan, list[tuple[int, int]]]]:
    """The steps of `CHUNKS`, each scoring every token it computes, with the (sequence, position) of each score.

    tables: for each group of layers a block table for each sequence.
    """
    done = [0] * len(sequences)
    for step, chunks in enumerate(CHUNKS):
        members = [b for b, chunk in enumerate(chunks) if chunk]
        places = [(b, p) for b in members for p in range(done[b], done[b] + chunks[b])]
        for b in members:
            done[b] += chunks[b]
        width = max(len(tables[0][b]) for b in members)
        rows = [[[*group[b], *[0] * (width - len(group[b]))] for b in members] for group in tables]
        ends = np.cumsum([chunks[b] for b in members])
        total = len(places)
        yield (
            StepPlan(
                step=step,
                input_ids=np.array([sequences[b][p] for b, p in places], dtype=np.int64),
                positions=np.array([p for _, p in places], dtype=np.int64),
                slots=np.array(
                    [[group[b][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for b, p in places] for group in tables],
                    dtype=np.int64,
                ),
                query_starts=np.concatenate([[0], ends]).astype(np.int32),
                context_lens=np.array([done[b] for b in members], dtype=np.int32),
                block_tables=np.array(rows, dtype=np.int32),
                logit_indices=np.concatenate([ends - 1, np.arange(total)]).astype(np.int64),
                sample_rows=np.arange(len(members), dtype=np.int32),
                out_indices=np.zeros(len(members), dtype=np.int64),
                params=(SamplingParams(temperature=0.0),) * len(members),
                histories=(None,) * len(members),
                score_targets=np.array([sequences[b][p] for b, p in places], dtype=np.int64),
                score_tops=np.full(total, VOCAB, dtype=np.int64),
                score_rows=np.array([members.index(b) for b, _ in places], dtype=np.int32),
            ),
            places,
        )
    assert done == [len(tokens) for tokens in sequences], "CHUNKS and LENGTHS do not add up"


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().max())  # a NaN wins


def _rms_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.cat(found) - torch.cat(exact)).square().mean().sqrt())


def _median_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.cat(found) - torch.cat(exact)).square().mean(-1).sqrt().median())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
