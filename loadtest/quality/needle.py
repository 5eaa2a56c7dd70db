"""Does the model still find a number that it read long ago? A passkey in a text, asked for at the end.

The task is that of arXiv:2305.16300, section 4.2. Perplexity hides what this shows: few tokens of a text depend on one
that was given up, but whoever asks about it gets nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from loadtest.quality.choices import GREEDY, Choice, Served
from server.bench.report import align
from server.scheduler.request import Request
from server.step import TokenLogprobs

DIGITS = 5


@dataclass(frozen=True, slots=True)
class Needle:
    """A text with a passkey in it, the question for it, and the answer. `ids` is all of that."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]


def make_needles(
    encode: Callable[[str], Sequence[int]], text: Sequence[int], count: int, length: int, seed: int
) -> list[Needle]:
    """Prompts of `length` tokens and their answers, in passages from anywhere in `text`.

    The passkey's sentence is in the first quarter, but not at its beginning, which budgets always keep.
    """
    rng = random.Random(seed)
    needles = []
    for _ in range(count):
        key = "".join(rng.choices("0123456789", k=DIGITS))
        sentence = encode(f" The secret passkey is {key}. Remember it: {key}. ")
        question = encode(" Question: what is the secret passkey? Answer: The secret passkey is")
        answer = tuple(encode(f" {key}"))
        filler = length - len(sentence) - len(question)
        start = rng.randrange(len(text) - filler)
        passage = text[start : start + filler]
        place = rng.randint(length // 16, length // 4 - len(sentence))
        needles.append(Needle((*passage[:place], *sentence, *passage[place:], *question, *answer), answer))
    return needles


@dataclass(frozen=True, slots=True)
class Answer:
    """loss: mean negative log-likelihood of the right answer's tokens, in nats.
    found: whether greedy decoding gives it, which is to say that each of its tokens is the likeliest after the others.
    """

    loss: float
    found: bool


def ask(served: Served, choice: Choice, needles: Sequence[Needle]) -> list[Answer]:
    """What a choice answers; all are asked at once."""
    requests = []
    for index, needle in enumerate(needles):
        length = len(needle.ids)
        budget = choice.budget(length - len(needle.answer), length)
        requests.append(Request(str(index), needle.ids, GREEDY, 0, prompt_logprobs=1, budget=budget))
    scores: dict[str, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
    for _, progress in served.steps(served.scheduler(requests)):
        for item in progress:
            scores[item.request.request_id] += item.scores
    answers = []
    for request, needle in zip(requests, needles, strict=True):
        last = scores[request.request_id][-len(needle.answer) :]
        assert tuple(score.token_id for score in last) == needle.answer
        loss = -math.fsum(score.logprob for score in last) / len(last)
        answers.append(Answer(loss, all(score.top[0][0] == score.token_id for score in last)))
    return answers


def ask_all(
    model: PreTrainedModel, choices: Sequence[Choice], needles: Sequence[Needle], show: Callable[[str], None]
) -> dict[Choice, list[Answer]]:
    answers = {}
    for choice in choices:
        answers[choice] = ask(Served(model, choice), choice, needles)
        show(f"needle: {choice.name} {mean_loss(answers[choice]):.3f}")
    return answers


def mean_loss(answers: Sequence[Answer]) -> float:
    return math.fsum(answer.loss for answer in answers) / len(answers)


def needle_table(answers: dict[Choice, list[Answer]]) -> str:
    rows = [["cache", "loss of the answer, nats", "least", "greatest", "found"]]
    for choice, given in answers.items():
        losses = [answer.loss for answer in given]
        figures = [mean_loss(given), min(losses), max(losses)]
        found = f"{sum(answer.found for answer in given)} of {len(given)}"
        rows.append([choice.name, *(f"{figure:.3f}" for figure in figures), found])
    return align(rows)
