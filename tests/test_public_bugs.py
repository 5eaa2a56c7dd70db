"""Faults that users of other servers reported about completions, tried on this one from outside.

Each test names the report it comes from. Those that need a server with limits of their own are in
`test_public_bugs_limits`, those about chat in `test_public_bugs_chat`.
"""

from __future__ import annotations

import json
import math
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.public_bugs import (
    COMPLETIONS,
    NEAR_TIE,
    Neighbour,
    Oracle,
    ask,
    check_alive,
    check_error,
    check_idle,
    force,
    post,
    stream,
    text_of,
)
from tests.test_server import Server

BLOCK = 16
VOCABULARY = 49152
A, A_SPACED, AAAA, EMOJI_BEGUN = 49, 330, 26024, 10813

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def oracle(embedded_path: Path) -> Oracle:
    return Oracle(embedded_path)


@pytest.fixture(scope="module")
def server(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("public_bugs") / "log"
    server = Server(log, "--kv-bytes=256MiB", "--max-num-seqs=24", f"--block-size={BLOCK}")
    try:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0
        assert "Traceback" not in log.read_text()
    finally:
        server.process.kill()


@pytest.fixture(autouse=True)
def _unharmed(server: Server) -> Iterator[None]:
    """Whatever a test tried, the server is alive and idle after it."""
    yield
    check_alive(server)
    check_idle(server)


def at_once(server: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to bodies sent together."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: ask(server, **body), bodies))


def both_ways(server: Server, **body: Any) -> dict[str, Any]:
    """The only choice of an answer, whose stream was seen to say the same."""
    answer = ask(server, **body)
    events = stream(server, **body)
    choice = answer["choices"][0]
    assert text_of(events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert isinstance(choice, dict)
    return {**choice, "usage": answer["usage"], "events": events}


# Completions wire format


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_alone_returns_the_prompt(server: Server, oracle: Oracle, logprobs: int | None) -> None:
    """vLLM 2706: echo with zero new tokens was a 500."""
    ids = oracle.encode("Red green")
    choice = both_ways(server, prompt="Red green", echo=True, max_tokens=0, logprobs=logprobs)
    assert (choice["text"], choice["finish_reason"]) == ("Red green", "length")
    assert choice["usage"]["completion_tokens"] == 0
    assert choice["usage"]["prompt_tokens"] == choice["usage"]["total_tokens"] == len(ids)
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    values = choice["logprobs"]["token_logprobs"]
    expected = oracle.logprobs(ids)
    assert values[0] is None
    assert values[1:] == pytest.approx([float(expected[i, ids[i + 1]]) for i in range(len(ids) - 1)], abs=1e-3)


def test_echoed_tokens_partition_the_text(server: Server, oracle: Oracle) -> None:
    """vLLM 5334: neighbouring newlines piled up in the strings of echoed tokens."""
    prompt = "\n\n\nA B\n\n1"
    ids = oracle.encode(prompt)
    answer = ask(server, prompt=prompt, echo=True, logprobs=1, max_tokens=3, temperature=0)
    text, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
    tokens = logprobs["tokens"]
    assert "".join(tokens) == text
    assert logprobs["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert {len(values) for values in logprobs.values()} == {len(ids) + answer["usage"]["completion_tokens"]}
    assert tokens[: len(ids)] == [oracle.tokenizer.decode([token_id]) for token_id in ids]


def test_empty_prompts_harm_nobody(server: Server) -> None:
    """vLLM 7283: one empty prompt stopped the engine for everybody."""
    with Neighbour(server):
        for prompt in ("", [""], [], [[]], ["ok", ""]):
            check_error(post(server, {"prompt": prompt, "max_tokens": 2}))


def test_zero_logprobs_are_the_drawn_tokens(server: Server) -> None:
    """vLLM 3707: `logprobs: 0` gave null."""
    choice = ask(server, prompt="x", max_tokens=2, logprobs=0, **force(A))["choices"][0]
    assert choice["logprobs"]["tokens"] == ["A", "A"]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [["A"], ["A"]]


def test_ids_outside_the_vocabulary_are_refused(server: Server) -> None:
    """vLLM 9634 and 54195: they crashed, or wrote into neighbours' rows."""
    with Neighbour(server):
        for bad in (VOCABULARY, -1, 1e20, 10**20, True):
            check_error(post(server, {"prompt": [bad]}))
            check_error(post(server, {"prompt": [[1], [1, bad]]}))
            check_error(post(server, {"prompt": "x", "stop_token_ids": [bad]}))
            check_error(post(server, {"prompt": "x", "allowed_token_ids": [bad]}))
        ask(server, prompt=[0, VOCABULARY - 1], max_tokens=1, stop_token_ids=[VOCABULARY - 1])


def test_huge_numbers_are_refused(server: Server) -> None:
    """SGLang 40076 and 36856: a billion logprobs killed the scheduler, n = 5 million filled the memory."""
    for fields in ({"logprobs": 10**9}, {"n": 5_000_000}, {"best_of": 5_000_000}, {"logprobs": -1}, {"n": 0}):
        check_error(post(server, {"prompt": "x", **fields}))


def test_only_allowed_tokens_are_drawn(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.5, "n": 2, "return_token_ids": True}
    for choice in ask(server, **body, allowed_token_ids=[A, A_SPACED, VOCABULARY - 1])["choices"]:
        assert set(choice["token_ids"]) <= {A, A_SPACED, VOCABULARY - 1}


def test_siblings_differ(server: Server) -> None:
    """vLLM 10852: n = 4 at temperature 1 gave four equal texts."""
    answer = ask(server, prompt="Once upon a time", n=4, temperature=1, max_tokens=16)
    assert len({choice["text"] for choice in answer["choices"]}) == 4


def test_an_answer_cut_by_its_cap_says_so(server: Server) -> None:
    """transformers 42157: the reason was always "stop"."""
    assert both_ways(server, prompt="x", max_tokens=3, **force(A))["finish_reason"] == "length"
    assert both_ways(server, prompt="x", max_tokens=3, **force(2))["finish_reason"] == "stop"


def test_scores_of_a_cached_prompt_are_those_of_the_first_time(server: Server) -> None:
    """vLLM 8268 and 42245: echo with logprobs crashed on cached blocks, or gave stale values."""
    ids = random.Random(8268).choices(range(1000, 40000), k=3 * BLOCK + 5)
    body = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    first, second = ask(server, **body), ask(server, **body)
    ask(server, prompt=ids, max_tokens=1)
    third = ask(server, **body)
    for later in (second, third):
        for name in ("tokens", "text_offset"):
            assert later["choices"][0]["logprobs"][name] == first["choices"][0]["logprobs"][name]
        assert later["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
            first["choices"][0]["logprobs"]["token_logprobs"][1:], abs=1e-3
        )


def test_errors_are_small(server: Server) -> None:
    """vLLM 49239: a small bad request got an error of 100 MB. The size is bounded in `check_error`."""
    nested: Any = {}
    for _ in range(500):
        nested = {"x" * 50: nested, "y": [nested] if len(str(nested)) < 1000 else 1}
    for body in ({"prompt": nested}, {"prompt": ["x", {"y" * 50_000: 1}]}, {"prompt": "x", "stop": ["\x00" * 90_000]}):
        check_error(post(server, body))


def test_deep_nesting_is_refused(server: Server) -> None:
    """Rapid-MLX 798, llama.cpp 25283: bodies nested 1,000-fold gave a 500 or a crash."""
    for depth in (1_000, 100_000):
        check_error(post(server, b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"))
        check_error(post(server, b'{"prompt":"x","a":' * depth + b"1" + b"}" * depth))


# Streaming


@pytest.mark.parametrize("prompt", ["🦜" * 10, "漢字の本 " * 3])
def test_characters_of_several_tokens_are_whole(server: Server, prompt: str) -> None:
    """QwenLM/Qwen 215: streamed text held U+FFFD where a character spans several tokens."""
    choice = both_ways(server, prompt=prompt, max_tokens=20, temperature=0)
    pieces = [event["choices"][0]["text"] for event in choice["events"]]
    assert sum(piece.count("\ufffd") for piece in pieces) == choice["text"].count("\ufffd")


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_character_that_never_ends_is_settled(server: Server, max_tokens: int) -> None:
    choice = both_ways(server, prompt="x", max_tokens=max_tokens, **force(EMOJI_BEGUN))
    assert (choice["usage"]["completion_tokens"], choice["finish_reason"]) == (max_tokens, "length")


@pytest.mark.parametrize(
    ("token_id", "stop", "text", "num_tokens"),
    [
        (A, ["AAA"], "", 3),
        (AAAA, ["AAAAAA"], "", 2),  # ends inside the second token
        (A_SPACED, ["A A"], " ", 2),  # begins inside the first
        (A, ["B", "AA", "AAA"], "", 2),
    ],
)
def test_stop_strings_over_token_borders(
    server: Server, token_id: int, stop: list[str], text: str, num_tokens: int
) -> None:
    """vLLM 3672, llama.cpp 11538: the first part of a stop string leaked into the stream, or it was missed."""
    choice = both_ways(server, prompt="AAA A A", max_tokens=20, stop=stop, **force(token_id))
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert choice["usage"]["completion_tokens"] == num_tokens
    assert all(event["choices"][0]["text"] in ("", text) for event in choice["events"])


def test_a_stop_string_before_min_tokens_does_not_count(server: Server) -> None:
    """vLLM 21987."""
    choice = both_ways(server, prompt="x", max_tokens=9, min_tokens=5, stop=["AA"], **force(A))
    assert choice["usage"]["completion_tokens"] == 6
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, None])
def test_stream_contract(server: Server, options: dict[str, bool] | None) -> None:
    """text-generation-inference 2336 and 2221: empty ids and reasons, no usage, no [DONE]."""
    body = {"prompt": "x", "max_tokens": 4, **force(A)}
    usage = ask(server, **body)["usage"]
    events = stream(server, **body, stream_options=options)
    assert {(event["object"], bool(event["id"])) for event in events} == {("text_completion", True)}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    if options and options["include_usage"]:
        last = events.pop()
        assert (last["choices"], last["usage"]) == ([], usage | {"prompt_tokens_details": {"cached_tokens": 0}})
        assert all(event["usage"] is None for event in events)
    else:
        assert not any("usage" in event for event in events)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]


# Sampling


def test_temperatures_near_zero(server: Server, oracle: Oracle) -> None:
    """vLLM 3063: between 1e-5 and 1e-4 every output was blank."""
    temperatures = (0, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38, 1e-300)
    bodies = [
        {"prompt": "One two three", "max_tokens": 8, "logprobs": 2, "temperature": t, "top_p": p}
        for t in temperatures
        for p in (1, 0.0001)
    ]
    choices = [
        answer["choices"][0] for answer in at_once(server, [{**body, "return_token_ids": True} for body in bodies])
    ]
    alone = ask(server, **bodies[0], return_token_ids=True)["choices"][0]
    prompt = oracle.encode("One two three")
    assert oracle.greedy(prompt, 8)[: len(alone["token_ids"])] == alone["token_ids"]
    for body, choice in zip(bodies, choices, strict=True):
        assert all(math.isfinite(value) and value <= 0 for value in choice["logprobs"]["token_logprobs"])
        if body["temperature"] <= 1e-4:
            oracle.is_near_tie(prompt, choice["token_ids"], alone["token_ids"])


def test_top_k_of_any_size(server: Server) -> None:
    """vLLM 14234, sendnn-inference 542: top_k above the vocabulary stopped the engine, as did mixed batches."""
    base = {"prompt": "Once", "max_tokens": 8, "temperature": 1, "seed": 3}
    greedy = {**base, "temperature": 0}
    free, least = (ask(server, **base)["choices"][0]["text"], ask(server, **greedy)["choices"][0]["text"])
    expected = dict.fromkeys((None, VOCABULARY, VOCABULARY + 1, 60_000, 2**31 - 1, 2**31, 0, -1), free) | {1: least}
    for top_k in (VOCABULARY + 1, 2**31, 1):
        assert ask(server, **base, top_k=top_k)["choices"][0]["text"] == expected[top_k], top_k
    for top_k in (-2, 1.5):
        check_error(post(server, {**base, "top_k": top_k}))
    answers = at_once(server, [greedy, *({**base, "top_k": top_k} for top_k in expected), greedy])
    assert [answer["choices"][0]["text"] for answer in answers] == [least, *expected.values(), least]


def test_biases_on_tokens_that_do_not_exist(server: Server) -> None:
    """vLLM 16529, SGLang 7670: a bias outside the vocabulary crashed the engine."""
    bad = [{"49152": 5}, {"-1": 5}, {"99999999999999999999": 1}, {"abc": 1}, {"1.5": 1}, {"49": 1000}, {"49": None}, []]
    with Neighbour(server):
        for bias in bad:
            check_error(post(server, {"prompt": "x", "max_tokens": 2, "logit_bias": bias}))
        for bias in ({"49151": -100}, {}, None):
            ask(server, prompt="x", max_tokens=2, logit_bias=bias)


def test_numbers_that_are_none(server: Server) -> None:
    """SGLang 28153: a temperature of NaN passed the checks and killed the server."""
    bad = ["NaN", "Infinity", "-Infinity", "1e400", '"nan"', '"0.5"', "true"]
    outside = {
        "temperature": ["-0.1", "2.5"], "top_p": ["-0.1", "1.5", "0"], "min_p": ["-0.1", "1.5"],
        "presence_penalty": ["-2.5", "2.5"], "frequency_penalty": ["-2.5", "2.5"], "repetition_penalty": ["0", "-1"],
    }  # fmt: skip
    with Neighbour(server), httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client:
        headers = {"content-type": "application/json"}
        for name, values in outside.items():
            for value in [*bad, *values]:
                body = f'{{"prompt":"x","max_tokens":1,"{name}":{value}}}'
                check_error(client.post(COMPLETIONS, content=body, headers=headers))
        nothing = json.dumps({"prompt": "x", "max_tokens": 1, **dict.fromkeys(outside)})
        assert client.post(COMPLETIONS, content=nothing, headers=headers).status_code == 200


# Scheduler and cache


@pytest.mark.parametrize("end", ["stop", "length", "eos", "disconnect"])
def test_what_is_cached_does_not_depend_on_how_a_request_ended(server: Server, oracle: Oracle, end: str) -> None:
    """vLLM 5543: answers changed after a request that shared the prefix had ended on a stop string."""
    ids = random.Random(end).choices(range(1000, 40000), k=2 * BLOCK + 3)
    first: dict[str, Any] = {"prompt": ids, **force(A)}
    ways: dict[str, dict[str, Any]] = {
        "stop": {"stop": ["A" * 31], "max_tokens": 40},
        "length": {"max_tokens": 30},
        "eos": {"max_tokens": 40, **force(2)},
    }
    before = None
    if end == "disconnect":
        leave_after_a_chunk(server, {**first, "max_tokens": 2000})
    else:
        before = ask(server, **first | ways[end])["choices"][0]["text"]
    prompts = [ids + [A] * count for count in (1, 5, 12, 13, 14, 28, 29, 30, 31, 32)]
    asked = {"prompt": prompts, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    cold = ask(server, **asked, cache_prompt=False)
    warm = ask(server, **asked)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompts) * 2 * BLOCK
    for prompt, one, other in zip(prompts, cold["choices"], warm["choices"], strict=True):
        oracle.is_near_tie(prompt, one["token_ids"], other["token_ids"])
    if before is not None:
        assert ask(server, **first | ways[end])["choices"][0]["text"] == before


def leave_after_a_chunk(server: Server, body: dict[str, Any]) -> None:
    content = {**body, "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=content, timeout=30, trust_env=False) as response:
        for _, _line in zip(range(60), response.iter_lines(), strict=False):
            pass


# Server


def test_requests_that_are_none_on_one_connection(server: Server) -> None:
    """SGLang 3805, vLLM 42961 and 11171: they gave a 500, and not even JSON."""
    json_type = {"content-type": "application/json"}
    cases: list[tuple[str, str, bytes, dict[str, str], int]] = [
        ("POST", COMPLETIONS, body, json_type, 400)
        for body in (
            b'{"prompt":"x",y}', b"", b'{"prompt":"x"', b"[]", b"null", b"7", b'"s"', b"{}", b'{"prompt":{}}',
            b'{"prompt":[1,"a"]}',
        )
    ]  # fmt: skip
    cases += [
        ("POST", COMPLETIONS, b'{"prompt":"x"}', {}, 415),
        ("POST", COMPLETIONS, b'{"prompt":"x"}', {"content-type": "text/plain"}, 415),
        ("GET", COMPLETIONS, b"", {}, 405),
        ("DELETE", COMPLETIONS, b"", {}, 405),
        ("POST", "/v1/completion", b"{}", json_type, 404),
        ("POST", COMPLETIONS, b'{"prompt":"x","model":"none"}', json_type, 404),
        ("POST", COMPLETIONS, b'{"prompt":"y","max_tokens":1,"prompt":"x"}', json_type, 200),
    ]
    with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client:
        ports = set()
        for method, path, body, headers, status in cases:
            response = client.request(method, path, content=body, headers=headers)
            assert response.status_code == status, (body, response.text)
            if status != 200:
                check_error(response, status)
            ports.add(response.extensions["network_stream"].get_extra_info("client_addr")[1])
        assert len(ports) == 1


def test_health_answers_while_megabytes_are_tokenized(server: Server) -> None:
    """vLLM 24910: the web process was busy with a prompt, and the probe killed it."""
    body = {"prompt": "word " * 200_000, "truncate_prompt_tokens": 8, "max_tokens": 1}
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask, server, **body)
        slowest = 0.0
        while not asking.done():
            begun = time.monotonic()
            assert httpx.get(f"{server.url}/health", timeout=10, trust_env=False).status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
            time.sleep(0.02)
        assert asking.result()["usage"]["prompt_tokens"] == 8
    assert slowest < 1


def test_nothing_is_fetched(server: Server) -> None:
    """vLLM 57157: what a client names is never fetched. A completion has no part that could be."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        for prompt in ([{"type": "image_url", "image_url": {"url": url}}], {"url": url}):
            check_error(post(server, {"prompt": prompt}))
        with pytest.raises(TimeoutError):
            listener.accept()


# Numerics


def test_neighbours_do_not_change_an_answer(server: Server, oracle: Oracle) -> None:
    """vLLM 5898 and 10336: at temperature 0 the answer depended on the requests around it."""
    rng = random.Random(5898)
    prompt = rng.choices(range(1000, 40000), k=20)
    target = {
        "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "logprobs": 3,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    alone = ask(server, **target)["choices"][0]
    oracle.is_near_tie(prompt, alone["token_ids"], oracle.greedy(prompt, 32))
    check_scores(oracle, prompt, alone)

    kinds: list[dict[str, Any]] = [
        {"temperature": 2}, {"top_k": 1}, {"logprobs": 5}, {"repetition_penalty": 1.5, "presence_penalty": 1},
        {"temperature": 0, "echo": True, "logprobs": 0}, {"top_p": 0.5, "logit_bias": {"49": 50}},
    ]  # fmt: skip
    near_ties = 0
    for count in (1, 15):
        neighbours = [
            {"prompt": rng.choices(range(49152), k=rng.choice((1, 17, 40, 120))), "max_tokens": rng.choice((1, 9, 40)),
             **kinds[i % len(kinds)]}
            for i in range(count)
        ]  # fmt: skip
        among = at_once(server, [*neighbours[: count // 2], target, *neighbours[count // 2 :]])[count // 2]["choices"][
            0
        ]
        near_ties += oracle.is_near_tie(prompt, among["token_ids"], alone["token_ids"])
        check_scores(oracle, prompt, among)
    listed = ask(server, **{**target, "prompt": [[5, 6, 7], prompt, prompt[:3]]})["choices"][1]
    near_ties += oracle.is_near_tie(prompt, listed["token_ids"], alone["token_ids"])
    assert near_ties <= 1


def check_scores(oracle: Oracle, prompt: list[int], choice: dict[str, Any]) -> None:
    """The log-probabilities of an output, its likeliest tokens among them, against the oracle's."""
    expected = oracle.logprobs([*prompt, *choice["token_ids"]])[len(prompt) - 1 :]
    for i, token_id in enumerate(choice["token_ids"]):
        assert choice["logprobs"]["token_logprobs"][i] == pytest.approx(float(expected[i, token_id]), abs=NEAR_TIE)
        for name, value in choice["logprobs"]["top_logprobs"][i].items():
            other = int(name.removeprefix("token_id:"))
            assert value == pytest.approx(float(expected[i, other]), abs=NEAR_TIE)
