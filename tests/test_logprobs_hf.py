"""Log-probabilities over HTTP against a Hugging Face forward pass: alone and batched, cold and warm.

Those of the prompt and of what was drawn are of the raw distribution, whatever the sampling does to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.bench.workload import load_prompts
from tests.public_bugs import Oracle, ask
from tests.test_server import Server

TOLERANCE = 1e-3
TOP = 5
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5, "seed": 1},
    {"temperature": 1, "seed": 2, "top_k": 3, "repetition_penalty": 1.3, "logit_bias": {"198": -100}},
]

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def oracle(embedded_path: Path) -> Oracle:
    return Oracle(embedded_path)


@pytest.fixture(scope="module")
def server(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("logprobs") / "log", "--kv-bytes=128MiB", "--max-num-batched-tokens=64")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.kill()


@pytest.fixture(scope="module")
def bodies(oracle: Oracle) -> list[dict[str, Any]]:
    """Prompts of 24 to 98 tokens, which the server computes in parts, each drawn from in another way."""
    prompts = [(oracle.encode(text) * 3)[: 24 + 37 * i] for i, text in enumerate(load_prompts()[: len(SAMPLING)])]
    return [
        {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "logprobs": TOP, **AS_IDS, **sampling}
        for prompt, sampling in zip(prompts, SAMPLING, strict=True)
    ]


AS_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def check(oracle: Oracle, choice: dict[str, Any]) -> None:
    """Every log-probability of a choice, those of its likeliest tokens too, against the unmodified model's."""
    scores = choice["logprobs"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    first = len(ids) - len(scores["tokens"])  # the prompt's are there if it was echoed
    assert scores["tokens"] == [f"token_id:{token_id}" for token_id in ids[first:]]
    expected = oracle.logprobs(ids)
    for position, value, top in zip(
        range(first, len(ids)), scores["token_logprobs"], scores["top_logprobs"], strict=True
    ):
        if position == 0:
            assert (value, top) == (None, None)
            continue
        row = expected[position - 1]
        assert value == pytest.approx(float(row[ids[position]]), abs=TOLERANCE)
        seen = {int(name.removeprefix("token_id:")): logprob for name, logprob in top.items()}
        for token_id, logprob in seen.items():
            assert logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        likeliest = sorted(seen.values(), reverse=True)[:TOP]
        assert likeliest == pytest.approx(row.topk(TOP).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("echo", [True, False])
def test_logprobs_equal_a_forward_pass(
    server: Server, oracle: Oracle, bodies: list[dict[str, Any]], echo: bool
) -> None:
    cold = [ask(server, **body, echo=echo, cache_prompt=False) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = list(threads.map(lambda body: ask(server, **body, echo=echo, cache_prompt=False), bodies))
    warm = [ask(server, **body, echo=echo) for body in bodies]
    for answers in (cold, together, warm):
        for answer in answers:
            check(oracle, answer["choices"][0])
    for one, other in zip(cold, together, strict=True):
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
    if not echo:  # a scored prompt is computed anew
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in warm]
        assert cached == [(len(body["prompt"]) - 1) // 16 * 16 for body in bodies]


def test_a_list_of_prompts_and_its_siblings(server: Server, oracle: Oracle, bodies: list[dict[str, Any]]) -> None:
    """The siblings of a prompt show its scores, computed once."""
    body = {**bodies[1], "prompt": [body["prompt"] for body in bodies[:2]], "n": 2, "echo": True, "max_tokens": 3}
    answer = ask(server, **body)
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        check(oracle, choice)
