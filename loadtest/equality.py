"""Does the runner compute what the unmodified model computes? On any device, in float32 and bfloat16.

Three sequences go through `ModelRunner` in chunks of mixed prefill and decode, over shuffled blocks of a pool full of
NaN; at every position the log-probabilities of the whole vocabulary are compared with those of Hugging Face's eager
forward pass over the whole sequence. A model with latents must be served from these; one whose layers look back to
different lengths, with a block table for each of several groups of layers, in which the trash block, full of NaN like
the others, stands for every block that the group no longer sees.

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
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from loadtest.architectures import ROUTED, VOCAB, tiny_model
from server.kvpool.layout import AttentionKind, CacheLayout, Visibility
from server.model.runner import ModelRunner
from server.step import SamplingParams, StepPlan, TokenLogprobs

LENGTHS = (23, 9, 14)
CHUNKS = ((10, 6, 5), (6, 1, 4), (4, 1, 1), (1, 1, 1), (1, 0, 1), (1, 0, 1), (0, 0, 1))
BLOCK_SIZE = 4
FLOAT32_TOLERANCE = 1e-4
BFLOAT16_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: an error, how large it may be, and what else is wrong, in words.

    cache: how the model is served, where that is not as usual.
    """

    error: float
    tolerance: float
    complaint: str = ""
    cache: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check in one dtype. `error` must not exceed `tolerance`; both None where nothing could be computed."""

    model: str
    dtype: str
    error: float | None
    tolerance: float | None
    ok: bool
    seconds: float
    note: str = ""
    cache: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def attempt(model: str, dtype: str, deadline: float, find: Callable[[], Finding]) -> Outcome:
    """Run a check, unless it is later than `deadline` of the monotonic clock.

    Whatever goes wrong is an outcome that is not ok, with its reason.
    """
    start = time.monotonic()
    if start > deadline:
        return Outcome(model, dtype, None, None, False, 0.0, "not done: the time for the whole check was over")
    try:
        found = find()
    except Exception as failure:
        note = f"{type(failure).__name__}: {failure}"
        return Outcome(model, dtype, None, None, False, time.monotonic() - start, note)
    ok = found.error <= found.tolerance and not found.complaint  # a NaN is not
    seconds = time.monotonic() - start
    return Outcome(model, dtype, found.error, found.tolerance, ok, seconds, found.complaint, found.cache)


def compute_exactly() -> None:
    """No TF32, on any device."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def run_matrix(
    names: Sequence[str], device: str, backend: str, seed: int, deadline: float, show: Callable[[str], None]
) -> list[Outcome]:
    """All models in both dtypes."""
    compute_exactly()
    outcomes = []
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            show(f"{name} in {_name(dtype)}")
            outcomes.append(check(name, dtype, device, backend, seed, deadline))
    return outcomes


def check(name: str, dtype: torch.dtype, device: str, backend: str, seed: int, deadline: float) -> Outcome:
    """Compare one model in one dtype."""
    return attempt(name, _name(dtype), deadline, lambda: _compare(name, dtype, device, backend, seed))


def _compare(name: str, dtype: torch.dtype, device: str, backend: str, seed: int) -> Finding:
    if name not in CONFIG_MAPPING:
        raise ValueError("this transformers does not know it")
    model = tiny_model(name, seed)
    move(model, torch.device(device), dtype)
    sequences = draw_sequences(seed)
    eager = [eager_logprobs(model, tokens) for tokens in sequences]
    paged = Paged(copy.deepcopy(model), backend, seed)
    served = paged.logprobs(sequences)
    cache, complaint = kept_as(model.config, paged.runner.layout)
    if dtype == torch.float32:
        error = largest(torch.cat(served), torch.cat(eager))
        return Finding(error, FLOAT32_TOLERANCE, complaint, cache)
    move(model, torch.device(device), torch.float32)
    exact = [eager_logprobs(model, tokens) for tokens in sequences]
    size = _median_error if name in ROUTED else _rms_error
    return Finding(size(served, exact), BFLOAT16_FACTOR * size(eager, exact), complaint, cache)


def kept_as(config: PreTrainedConfig, layout: CacheLayout) -> tuple[str, str]:
    """How the cache is kept, and what is wrong with that, judged by the model's own configuration."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "kv_lora_rank", None) is not None:
        latent = all(layer.kind is AttentionKind.MLA and layer.value_dim == 0 for layer in layout.layers)
        return ("latent", "") if latent else ("", "it has latents, but is not served from them")
    if len(kinds) > 1:
        tables = len(layout.groups)
        words = f"its layers are of {len(kinds)} kinds, but share {tables} block table(s)"
        return f"{tables} tables", "" if tables >= len(kinds) else words
    return "", ""


def move(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """`module.to`, which transformers declares in a way that no checker of types follows."""
    module.to(device=device, dtype=dtype)


def draw_sequences(seed: int) -> list[list[int]]:
    """Token ids of LENGTHS."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


@torch.inference_mode()
def eager_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[T, V] log-probabilities of the unmodified model, in double precision on the CPU."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits
    return logits[0].double().log_softmax(-1).cpu()


def logprobs_of(scores: Sequence[TokenLogprobs]) -> torch.Tensor:
    """[P, V] from P scored positions that name the whole vocabulary, in double precision on the CPU."""
    result = torch.full((len(scores), VOCAB), float("nan"), dtype=torch.float64)
    for row, score in zip(result, scores, strict=True):
        tokens, values = zip(*score.top, strict=True)
        row[list(tokens)] = torch.tensor(values, dtype=torch.float64)
    return result


class Paged:
    """A runner whose pool is full of NaN, with shuffled blocks for sequences of LENGTHS; alike for equal seeds."""

    def __init__(self, model: PreTrainedModel, backend: str, seed: int, cache_dtype: str = "auto") -> None:
        self.runner = ModelRunner(model, backend, BLOCK_SIZE, cache_dtype=cache_dtype)
        blocks_each = [-(-length // BLOCK_SIZE) for length in LENGTHS]
        groups = len(self.runner.layout.groups)
        num_blocks = 1 + groups * sum(blocks_each) + 3
        self.runner.allocate(num_blocks)
        self.runner.pool.fill_(float("nan"))
        blocks = list(range(1, num_blocks))
        random.Random(seed).shuffle(blocks)
        self._tables = [[[blocks.pop() for _ in range(count)] for count in blocks_each] for _ in range(groups)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """[T, V] log-probabilities of each sequence through the runner, in double precision on the CPU."""
        result = [torch.full((len(tokens), VOCAB), float("nan"), dtype=torch.float64) for tokens in sequences]
        visibilities = [group.visibility for group in self.runner.layout.groups]
        for plan, places in plans(sequences, self._tables, visibilities):
            computed = logprobs_of(self.runner.run(plan).scores)
            for (sequence, position), row in zip(places, computed, strict=True):
                result[sequence][position] = row
        return result


def plans(
    sequences: Sequence[Sequence[int]],
    tables: Sequence[Sequence[Sequence[int]]],
    visibilities: Sequence[Visibility],
) -> Iterator[tuple[StepPlan, list[tuple[int, int]]]]:
    """The steps of `CHUNKS`, each scoring every token it computes, with the (sequence, position) of each score.

    tables: for each group of layers a block table for each sequence. visibilities: what each group sees; blocks that
    are out of sight stand in the plans as the trash block.
    """
    done = [0] * len(sequences)
    for step, chunks in enumerate(CHUNKS):
        members = [b for b, chunk in enumerate(chunks) if chunk]
        places = [(b, p) for b in members for p in range(done[b], done[b] + chunks[b])]
        width = max(len(tables[0][b]) for b in members)
        hidden = [[sight.first(done[b]) // BLOCK_SIZE for b in members] for sight in visibilities]
        rows = [
            [
                [*[0] * gone, *group[b][gone:], *[0] * (width - len(group[b]))]
                for b, gone in zip(members, of, strict=True)
            ]
            for group, of in zip(tables, hidden, strict=True)
        ]
        for b in members:
            done[b] += chunks[b]
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


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; a NaN wins."""
    return float((found - expected).abs().max())


def _rms_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.cat(found) - torch.cat(exact)).square().mean().sqrt())


def _median_error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return float((torch.cat(found) - torch.cat(exact)).square().mean(-1).sqrt().median())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
