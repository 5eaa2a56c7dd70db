"""What the script says of a cache is what a plain forward pass, real decoding and plain loops say of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from loadtest.quality.__main__ import Findings, Scope, passage
from loadtest.quality.choices import CHOICES, FULL, GREEDY, Choice, Served
from loadtest.quality.needle import Answer, Needle, ask, make_needles, needle_table
from loadtest.quality.perplexity import Reader, Reading, perplexity_table
from loadtest.quality.speed import race
from server.scheduler.request import Request
from server.step import TokenLogprobs
from server.text.tokenizer import Tokenizer
from tests.tiny_checkpoint import VOCAB_SIZE, save_tiny_checkpoint

LENGTH, START = 400, 200
H2O = Choice("H2O, 1/4", policy="h2o", share=4)
WINDOW = Choice("window, 1/4", policy="window", share=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("quality"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()


def plain_losses(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """Of all tokens but the first, by the model as transformers made it."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    return [-float(logprobs[place, token]) for place, token in enumerate(ids[1:])]


def distributions(served: Served, choice: Choice, ids: list[int]) -> list[dict[int, float]]:
    """All log-probabilities of each token but the first, as a request may ask for them."""
    request = Request("all", ids, GREEDY, 0, prompt_logprobs=VOCAB_SIZE, budget=choice.budget(len(ids), len(ids)))
    scores: list[TokenLogprobs] = []
    for _, progress in served.steps(served.scheduler([request])):
        scores += progress[0].scores
    return [dict(score.top) for score in scores]


@pytest.fixture(scope="module")
def reader(model: PreTrainedModel, ids: list[int]) -> Reader:
    """One that has read the text with the full cache."""
    reader = Reader(ids, START)
    reader.read(Served(model, FULL), FULL)
    return reader


def test_float32_is_the_plain_model(model: PreTrainedModel, ids: list[int]) -> None:
    reading = Reader(ids, START).read(Served(model, FULL), FULL)
    expected = plain_losses(model, ids)[START - 1 :]
    assert reading.losses == pytest.approx(expected, abs=1e-4)
    assert reading.perplexity == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-4)
    assert (reading.divergence, reading.agreement, reading.held) == (0.0, 1.0, LENGTH)


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_a_budget_that_is_never_outgrown_changes_nothing(
    model: PreTrainedModel, reader: Reader, policy: str, ids: list[int]
) -> None:
    ample = Choice("ample", policy=policy, share=1)
    full, reading = (reader.read(Served(model, choice), choice) for choice in (FULL, ample))
    assert reading == full


@pytest.mark.parametrize("choice", [Choice("int8", "int8"), H2O, WINDOW], ids=lambda choice: choice.name)
def test_a_lossy_cache_is_compared_with_the_full_one(
    model: PreTrainedModel, reader: Reader, choice: Choice, ids: list[int]
) -> None:
    reading = reader.read(Served(model, choice), choice)
    full, own = (distributions(Served(model, kind), kind, ids)[START - 1 :] for kind in (FULL, choice))
    pairs = list(zip(full, own, strict=True))
    divergences = [sum(math.exp(p) * (p - q[token]) for token, p in f.items()) for f, q in pairs]
    same = [max(f, key=f.__getitem__) == max(q, key=q.__getitem__) for f, q in pairs]
    assert reading.losses == pytest.approx([-q[token] for q, token in zip(own, ids[START:], strict=True)])
    assert reading.divergence == pytest.approx(sum(divergences) / len(divergences), rel=1e-3)
    assert reading.divergence > 0
    assert reading.agreement == pytest.approx(sum(same) / len(same))
    assert reading.held == choice.most_held(LENGTH) == (164 if choice.policy else LENGTH)


def test_needles_are_early_in_texts_of_the_length_asked_for(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(str(checkpoint))
    text = tokenizer.encode(passage())
    needles = make_needles(tokenizer.encode, text, 20, 400, seed=3)
    assert needles == make_needles(tokenizer.encode, text, 20, 400, seed=3)
    assert needles != make_needles(tokenizer.encode, text, 20, 400, seed=4)
    for needle in needles:
        key = tokenizer.decode(list(needle.answer), skip_special_tokens=False).strip()
        words = tokenizer.decode(list(needle.ids), skip_special_tokens=False)
        assert len(needle.ids) == 400 + len(needle.answer)
        assert words.endswith(f"The secret passkey is {key}")
        assert 25 <= words.index(f" The secret passkey is {key}. Remember it: {key}. ") < 100
        assert needle.ids[:20] not in [other.ids[:20] for other in needles if other is not needle]


@pytest.mark.parametrize("choice", [FULL, H2O, WINDOW], ids=lambda choice: choice.name)
def test_found_is_what_greedy_decoding_says(model: PreTrainedModel, choice: Choice, ids: list[int]) -> None:
    prompt, count = ids[: LENGTH - 5], 5
    request = Request("greedy", prompt, GREEDY, count, budget=choice.budget(len(prompt), len(prompt) + count))
    served = Served(model, choice)
    for _ in served.steps(served.scheduler([request])):
        pass
    right = tuple(request.output_ids.tolist())
    wrong = (*right[:-1], (right[-1] + 1) % VOCAB_SIZE)
    answers = ask(served, choice, [Needle((*prompt, *answer), answer) for answer in (right, wrong, right)])
    assert [answer.found for answer in answers] == [True, False, True]
    assert answers[0].loss == pytest.approx(answers[2].loss)
    assert answers[0].loss < answers[1].loss
    if choice is FULL:
        assert answers[0].loss == pytest.approx(sum(plain_losses(model, [*prompt, *right])[-count:]) / count, abs=1e-4)


def test_each_choice_has_as_many_turns_and_is_compared_within_the_round(model: PreTrainedModel, ids: list[int]) -> None:
    prompts = [ids[start : start + 120] for start in range(8)]
    speeds = race(model, [H2O, FULL], prompts, rounds=3, steps=30, show=lambda text: None)
    assert [len(speed.rates) for speed in speeds.values()] == [3, 3]
    assert speeds[FULL].ratios == (1.0, 1.0, 1.0)
    for rate, full, ratio in zip(speeds[H2O].rates, speeds[FULL].rates, speeds[H2O].ratios, strict=True):
        assert rate > 0
        assert ratio == pytest.approx(rate / full)


def test_all_parts_are_printed(model: PreTrainedModel, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = Scope(length=320, needles=1, needle_length=400, context=64, rounds=1, steps=1)
    findings = Findings(model, Tokenizer.load(str(checkpoint)), scope, seed=0)
    for part in (findings.memory, findings.perplexity, findings.needle, findings.speed):
        part()
    words = capsys.readouterr().out
    for title in ("memory: ", "perplexity: tokens 161 to 320", "needle: 1 passkeys", "speed: 8 sequences of 64 tokens"):
        assert title in words
    lines = words.splitlines()
    rows = {choice: [line.split() for line in lines if line.startswith(f"{choice.name}  ")] for choice in CHOICES}
    assert all(len(found) == 4 for found in rows.values())
    # Two layers of two heads, keys and values of eight numbers; two scales; a score.
    expected = {"float32": 2 * 2 * 16 * 4, "int8": 2 * 2 * (16 + 8), "int8 and H2O, 1/4": 2 * 2 * (16 + 8 + 4)}
    for choice, found in rows.items():
        if choice.name in expected:
            assert found[0][len(choice.name.split())] == str(expected[choice.name])
    assert len(findings.verdicts) == 1 + 3 + 3


def test_the_tables_show_what_was_found() -> None:
    full = Reading((math.log(4.0),) * 4, 0.0, 1.0, 2048)
    worse = replace(full, losses=(math.log(5.0),) * 4, divergence=0.25, agreement=0.875, held=640)
    assert [line.split() for line in perplexity_table({FULL: full, H2O: worse}).splitlines()[1:]] == [
        ["float32", "2,048", "4.000", "1.0000", "0.000000", "100.0%"],
        ["H2O,", "1/4", "640", "5.000", "1.2500", "0.250000", "87.5%"],
    ]
    table = needle_table({FULL: [Answer(0.5, True), Answer(1.0, False)]})
    assert table.splitlines()[1].split() == ["float32", "0.750", "0.500", "1.000", "1", "of", "2"]
