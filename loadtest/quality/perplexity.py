"""How well the model still predicts a text: each token from all before it, through the cache as it is by then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from loadtest.quality.choices import FULL, GREEDY, Choice, Served
from server.bench.report import align
from server.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Reading:
    """How one choice read the text.

    losses: negative log-likelihood of each counted token, in nats.
    divergence: mean over them of KL(full cache || this one), in nats. agreement: share with the same likeliest token.
    held: most tokens that the cache had at a time.
    """

    losses: tuple[float, ...]
    divergence: float
    agreement: float
    held: int

    @property
    def loss(self) -> float:
        return math.fsum(self.losses) / len(self.losses)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


class Reader:
    """Reads a text time and again, and compares with the first time, which must be with the full cache.

    ids: the text. start: index of the first token that counts, at least 1.
    """

    def __init__(self, ids: Sequence[int], start: int) -> None:
        self.ids = ids
        self.start = start
        self._full = torch.empty(0)  # log-probabilities [counted tokens, V]

    def read(self, served: Served, choice: Choice) -> Reading:
        """Score the text as the prompt of a request."""
        length = len(self.ids)
        request = Request("text", self.ids, GREEDY, 0, prompt_logprobs=0, budget=choice.budget(length, length))
        losses: list[float] = []
        rows: list[Tensor] = []
        divergence = agreed = 0.0
        held = 0
        first = 1  # token that the step scores first
        for plan, (progress,) in served.steps(served.scheduler([request])):
            held = max(held, int(plan.context_lens[0]))
            skipped = min(len(progress.scores), max(0, self.start - first))
            first += len(progress.scores)
            scores = progress.scores[skipped:]
            found = served.logits[skipped:].float().log_softmax(-1)
            full = self._full[len(losses) : len(losses) + len(scores)] if len(self._full) else found
            divergence += float(kl_div(found, full, reduction="sum", log_target=True))
            agreed += int((found.argmax(-1) == full.argmax(-1)).sum())
            losses += [-score.logprob for score in scores]
            if full is found:
                rows.append(found)
        assert len(losses) == length - self.start, "a token was not scored"
        if rows:
            self._full = torch.cat(rows)
        return Reading(tuple(losses), divergence / len(losses), agreed / len(losses), held)


def read_all(
    model: PreTrainedModel, reader: Reader, choices: Sequence[Choice], show: Callable[[str], None]
) -> dict[Choice, Reading]:
    """FULL must be the first of the choices."""
    assert choices[0] is FULL, "there is nothing to compare with"
    readings = {}
    for choice in choices:
        readings[choice] = reader.read(Served(model, choice), choice)
        show(f"perplexity: {choice.name} {readings[choice].perplexity:.3f}")
    return readings


def perplexity_table(readings: dict[Choice, Reading]) -> str:
    full = readings[FULL]
    rows = [["cache", "tokens held", "perplexity", "/ float32", "KL, nats", "same top-1"]]
    for choice, reading in readings.items():
        rows.append(
            [
                choice.name,
                f"{reading.held:,}",
                f"{reading.perplexity:.3f}",
                f"{reading.perplexity / full.perplexity:.4f}",
                f"{reading.divergence:.6f}",
                f"{reading.agreement:.1%}",
            ]
        )
    return align(rows)
