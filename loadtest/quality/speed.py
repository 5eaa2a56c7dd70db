"""How fast sequences are continued beside each other, by turns, since machines are not equally fast at all times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from loadtest.quality.choices import BLOCK_SIZE, FULL, GREEDY, Choice, Served
from server.bench.report import align
from server.scheduler.request import Request

SEQUENCES = 8


class Decoding:
    """Sequences that are continued greedily, once their prompts are computed.

    prompts: one for each. most: tokens by which each may be continued from then on.
    """

    def __init__(self, served: Served, choice: Choice, prompts: Sequence[Sequence[int]], most: int) -> None:
        # Those whose prompts are done first go on while the others' are computed, a token a step.
        most += sum(map(len, prompts)) // BLOCK_SIZE
        requests = [
            Request(str(index), prompt, GREEDY, most, budget=choice.budget(len(prompt), len(prompt) + most))
            for index, prompt in enumerate(prompts)
        ]
        self._steps = served.steps(served.scheduler(requests))
        while any(request.is_prefilling for request in requests):
            next(self._steps)

    def rate(self, steps: int) -> float:
        """Tokens a second in the next so many steps."""
        begun = time.perf_counter()
        tokens = sum(next(self._steps)[0].num_tokens for _ in range(steps))
        return tokens / (time.perf_counter() - begun)


@dataclass(frozen=True, slots=True)
class Speed:
    """The turns of one choice. rates: tokens a second; ratios: over the full cache's in the same round."""

    rates: tuple[float, ...]
    ratios: tuple[float, ...]


def race(
    model: PreTrainedModel,
    choices: Sequence[Choice],
    prompts: Sequence[Sequence[int]],
    rounds: int,
    steps: int,
    show: Callable[[str], None],
) -> dict[Choice, Speed]:
    """Each choice has a turn of so many steps in each round, in rotating order. FULL must be among them."""
    decodings = {}
    for choice in choices:
        decodings[choice] = Decoding(Served(model, choice), choice, prompts, rounds * steps)
        show(f"speed: {choice.name} is ready")
    rates: dict[Choice, list[float]] = {choice: [] for choice in choices}
    for number in range(rounds):
        for place in range(len(choices)):
            choice = choices[(number + place) % len(choices)]
            rates[choice].append(decodings[choice].rate(steps))
        show(f"speed: round {number + 1} of {rounds}")
    return {
        choice: Speed(tuple(own), tuple(rate / full for rate, full in zip(own, rates[FULL], strict=True)))
        for choice, own in rates.items()
    }


def speed_table(speeds: dict[Choice, Speed]) -> str:
    """Medians over the rounds, with the least and the greatest ratio."""
    rows = [["cache", "tokens/s", "/ float32", "least", "greatest"]]
    for choice, speed in speeds.items():
        ratios = [statistics.median(speed.ratios), min(speed.ratios), max(speed.ratios)]
        rows.append([choice.name, f"{statistics.median(speed.rates):.1f}", *(f"{ratio:.2f}" for ratio in ratios)])
    return align(rows)
