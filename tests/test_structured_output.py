"""Constrained requests in the engine, on a tiny random model: beside free ones, several at once, preempted, failing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from server.api.sequences import sequences
from server.api.wire import SamplingFields
from server.generation import GrammarFailed, Output
from server.step import ConstraintFailed, Int32Array, SamplingParams
from server.text.grammar import Grammar, GrammarCompiler, GrammarError, GrammarSpec
from tests.engine_harness import Harness, collect, text_of
from tests.text.walks import SCHEMAS
from tests.tiny_checkpoint import save_tiny_checkpoint

EOS = 256
EVENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
SAMPLED = SamplingParams(temperature=1.0, seed=3, stop_token_ids=frozenset({EOS}))
GREEDY = SamplingParams(temperature=0.0, stop_token_ids=frozenset({EOS}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def harness(checkpoint: Path) -> AsyncIterator[Harness]:
    harness = Harness(checkpoint)
    await harness.ready()
    yield harness
    await harness.engine.drain(0.0)
    await harness.engine.stop()


def compiled(harness: Harness, spec: GrammarSpec) -> Grammar:
    model, tokenizer = harness.engine.model, harness.engine.tokenizer
    assert model is not None
    assert tokenizer is not None
    return GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids).compile(spec)


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


async def test_the_text_is_what_the_schema_asks_for(harness: Harness) -> None:
    grammar = compiled(harness, schema(EVENT))
    for params in (GREEDY, SAMPLED, SamplingParams(temperature=2.0, top_p=0.9, seed=5)):
        request = harness.request(max_tokens=200, params=params, constraint=grammar.start())
        outputs = await collect(harness.submit(request))
        jsonschema.validate(json.loads(text_of(outputs)), EVENT)
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
        assert outputs[-1].usage.completion_tokens == len(tokens_of(outputs))
    await harness.settled()
    assert harness.value("requests_total", endpoint="completions", finish_reason="stop") == 3


async def test_free_neighbours_get_the_same_tokens_to_the_bit(harness: Harness) -> None:
    grammar = compiled(harness, GrammarSpec("regex", "[a-z]{60}"))

    async def batch(constrained: bool) -> list[list[Output]]:
        """Four requests of one length, every second one constrained or not."""
        requests = []
        for i in range(4):
            params = SamplingParams(temperature=i // 2, seed=i, logprobs=3)
            constraint = grammar.start() if constrained and i % 2 else None
            requests.append(harness.request((7, 8, 9), max_tokens=60, params=params, constraint=constraint))
        return await asyncio.gather(*map(collect, harness.engine.submit(requests)))

    free, mixed = await batch(False), await batch(True)
    for row in (0, 2):
        assert [token for output in mixed[row] for token in output.tokens] == [
            token for output in free[row] for token in output.tokens
        ]
    for row in (1, 3):
        assert re.fullmatch("[a-z]{60}", text_of(mixed[row]))
        assert tokens_of(free[row]) != tokens_of(mixed[row])


async def test_every_schema_in_one_batch(harness: Harness) -> None:
    model, tokenizer = harness.engine.model, harness.engine.tokenizer
    assert model is not None
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
    entries = [entry for entry in SCHEMAS if "refused" not in entry]
    entries = Random(0).sample(entries, 48)
    params = [SamplingParams(temperature=1.0, seed=i, stop_token_ids=frozenset({EOS})) for i in range(len(entries))]
    requests = [
        harness.request(max_tokens=150, params=own, constraint=compiler.compile(schema(entry["schema"])).start())
        for entry, own in zip(entries, params, strict=True)
    ]
    answers = await asyncio.gather(*(collect(harness.submit(request)) for request in requests))
    ended = 0
    for entry, outputs in zip(entries, answers, strict=True):
        assert outputs[-1].finish_reason in ("stop", "length")
        if outputs[-1].finish_reason == "stop":
            ended += 1
            jsonschema.Draft202012Validator(entry["schema"]).validate(json.loads(text_of(outputs)))
    assert ended > len(entries) / 2


async def test_siblings_each_follow_the_grammar_in_their_own_way(harness: Harness) -> None:
    grammar = compiled(harness, GrammarSpec("regex", "[a-z]{12}"))
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
    requests = sequences(
        SamplingFields(), tuple(range(1, 51)), params, 40, prefix="n", first=0, endpoint="completions", streaming=True,
        settings=harness.engine.settings, constrain=grammar.start,
    )  # fmt: skip
    answers = await asyncio.gather(*map(collect, harness.engine.submit(requests)))
    texts = {text_of(outputs) for outputs in answers}
    assert len(texts) == 4
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert [outputs[-1].usage.cached_tokens for outputs in answers] == [0, 48, 48, 48]


async def test_a_stream_has_its_characters_whole(harness: Harness) -> None:
    grammar = compiled(harness, schema({"const": "🦜漢é"}))
    outputs = await collect(harness.submit(harness.request(max_tokens=40, params=GREEDY, constraint=grammar.start())))
    assert [output.text for output in outputs] == ['"', "🦜", "漢", "é", '"']


async def test_a_preempted_request_goes_on_where_it_was(checkpoint: Path) -> None:
    texts = []
    for blocks in (64, 14):
        harness = Harness(checkpoint, kv_blocks=blocks, enable_prefix_caching=False)
        await harness.ready()
        grammar = compiled(harness, GrammarSpec("regex", "([a-z]{5} ){16}[A-Z]{4}"))
        params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(4)]
        requests = [harness.request((9,) * 20, 150, params=own, constraint=grammar.start()) for own in params]
        answers = await asyncio.gather(*(collect(harness.submit(request)) for request in requests))
        texts.append([text_of(outputs) for outputs in answers])
        await harness.settled()
        assert (harness.total("preemptions_total") > 0) == (blocks == 14)
        await harness.engine.stop()
    assert texts[0] == texts[1]
    assert all(re.fullmatch("([a-z]{5} ){16}[A-Z]{4}", text) for text in texts[0])


async def test_max_tokens_and_stop_strings_cut_a_constrained_text(harness: Harness) -> None:
    grammar = compiled(harness, GrammarSpec("choice", ("abcdefgh",)))
    cut = await collect(harness.submit(harness.request(max_tokens=3, params=GREEDY, constraint=grammar.start())))
    assert (text_of(cut), cut[-1].finish_reason) == ("abc", "length")
    exact = await collect(harness.submit(harness.request(max_tokens=8, params=GREEDY, constraint=grammar.start())))
    assert (text_of(exact), exact[-1].finish_reason) == ("abcdefgh", "stop")
    request = harness.request(max_tokens=20, params=GREEDY, constraint=grammar.start(), stop=("ef",))
    stopped = await collect(harness.submit(request))
    assert (text_of(stopped), stopped[-1].finish_reason, stopped[-1].stop_reason) == ("abcd", "stop", "ef")


async def test_the_grammar_wins_over_min_tokens_bias_and_ignored_ends(harness: Harness) -> None:
    short = compiled(harness, GrammarSpec("regex", "ab?"))
    early = SamplingParams(temperature=0.0, min_tokens=30, stop_token_ids=frozenset({EOS}))
    outputs = await collect(harness.submit(harness.request(max_tokens=40, params=early, constraint=short.start())))
    assert (text_of(outputs), outputs[-1].finish_reason) == ("ab", "stop"), "the end was banned, 'b' was not"
    against = SamplingParams(temperature=0.0, logit_bias={64: -100.0, 65: -100.0, EOS: 100.0})
    one = compiled(harness, GrammarSpec("choice", ("ab",)))
    outputs = await collect(harness.submit(harness.request(max_tokens=40, params=against, constraint=one.start())))
    assert text_of(outputs) == "ab"
    ignoring = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0})  # no stop tokens
    state = compiled(harness, GrammarSpec("regex", "a{5,7}")).start(ignore_eos=True)
    outputs = await collect(harness.submit(harness.request(max_tokens=40, params=ignoring, constraint=state)))
    assert (text_of(outputs), outputs[-1].finish_reason) == ("a" * 7, "stop")
    state = compiled(harness, GrammarSpec("choice", ("",))).start(ignore_eos=True)
    outputs = await collect(harness.submit(harness.request(max_tokens=40, params=ignoring, constraint=state)))
    assert (text_of(outputs), outputs[-1].finish_reason) == ("", "stop")


class Failing:
    """A constraint that lets tokens through until it fails, in its mask or when it takes a token."""

    finished = False

    def __init__(self, steps: int, in_mask: bool) -> None:
        self._left = steps
        self._in_mask = in_mask

    def fill_mask(self, mask: Int32Array) -> None:
        if self._in_mask and self._left == 0:
            raise ConstraintFailed("the grammar became too complex")
        mask[:] = -1

    def accept(self, token_id: int) -> None:
        self._left -= 1
        if not self._in_mask and self._left == 0:
            raise ConstraintFailed("the grammar became too complex")


@pytest.mark.parametrize("in_mask", [True, False])
async def test_a_grammar_that_fails_takes_nobody_with_it(harness: Harness, in_mask: bool) -> None:
    good = [harness.submit(harness.request((i,) * 5, max_tokens=30)) for i in range(3)]
    bad = harness.submit(harness.request(max_tokens=30, constraint=Failing(5, in_mask)))
    with pytest.raises(GrammarFailed, match="too complex"):
        await collect(bad)
    for outputs in await asyncio.gather(*map(collect, good)):
        assert tokens_of(outputs) == [65] * 30
    await harness.settled()
    assert harness.value("requests_total", endpoint="completions", finish_reason="error") == 1
    assert harness.value("requests_total", endpoint="completions", finish_reason="length") == 3
    assert harness.engine.status.phase.value == "ready"


async def test_a_grammar_without_a_text_is_refused_before_it_runs(harness: Harness) -> None:
    with pytest.raises(GrammarError, match="permits no text"):
        compiled(harness, GrammarSpec("regex", r"[^\s\S]"))


async def test_special_tokens_are_shown_where_they_are_asked_for(harness: Harness) -> None:
    params = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0})
    hidden = await collect(harness.submit(harness.request(max_tokens=2, params=params)))
    request = harness.request(max_tokens=2, params=params, shown_special_ids=frozenset({EOS}))
    shown = await collect(harness.submit(request))
    assert (text_of(hidden), text_of(shown)) == ("", "<|end|>" * 2)
