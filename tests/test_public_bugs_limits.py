"""Faults that users of other servers reported under tight limits, at disconnects and at the end: tried from outside.

The model is tiny and random: what is tried here does not depend on what it says.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from tests.public_bugs import CHAT, Oracle, ask, check_error, check_idle, events_of, post, stream, text_of
from tests.test_server import Server
from tests.tiny_checkpoint import save_tiny_checkpoint

BLOCK, POOL = 16, 8
LIMIT = BLOCK * POOL
END = 256
LETTER_A = sorted(ByteLevel.alphabet()).index("A")
FORCED = {"temperature": 0, "logit_bias": {str(LETTER_A): 100}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for long answers."""
    path = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return path


@contextmanager
def serving(checkpoint: Path, log: Path, *flags: str, kind: type[Server] = Server) -> Iterator[Server]:
    server = kind(log, str(checkpoint), "--served-model-name=tiny", *flags)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.kill()


@pytest.fixture(scope="module")
def small(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A pool of as many tokens as a request may have, which two requests can fill."""
    template = "{{ raise_exception('roles must alternate') }}"
    flags = (
        f"--block-size={BLOCK}", f"--kv-blocks={POOL}", "--max-num-seqs=2", "--max-model-len=512",
        f"--chat-template={template}",
    )  # fmt: skip
    with serving(checkpoint, tmp_path_factory.mktemp("small") / "log", *flags) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def narrow(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Much room, but for two requests at a time, and prompts are computed in small parts."""
    flags = ("--kv-blocks=2000", "--max-num-seqs=2", "--max-num-batched-tokens=64")
    with serving(checkpoint, tmp_path_factory.mktemp("narrow") / "log", *flags) as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


def check_alive(server: Server, within: float = 10.0) -> None:
    response = post(server, {"prompt": "x", "max_tokens": 2, **FORCED}, timeout=within)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "AA"


# A pool that is too small


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
@pytest.mark.parametrize("cached", [True, False])
def test_preemption_never_changes_an_answer(
    small: Server, oracle: Oracle, sampling: dict[str, Any], cached: bool
) -> None:
    """vllm-gaudi 524: tokens were counted twice and only the prompt was computed again."""
    rng = random.Random(524)
    prompts = [rng.sample(range(256), 33) for _ in range(2)]
    fields = {"max_tokens": 40, "logit_bias": {str(END): -100}, "cache_prompt": cached, **sampling}
    bodies = [{**fields, "prompt": prompt, "return_token_ids": True} for prompt in prompts]
    alone = [ask(small, **body)["choices"][0] for body in bodies]
    before = small.metrics()["preemptions_total"]
    with ThreadPoolExecutor(4) as threads:
        for ask_one in (ask, _streamed):
            together = list(threads.map(lambda body, ask_one=ask_one: ask_one(small, **body), bodies))
            for answer, body, own in zip(together, bodies, alone, strict=True):
                choice = answer["choices"][0]
                assert (choice["token_ids"], choice["text"]) == (own["token_ids"], own["text"])
                assert choice["finish_reason"] == "length"
                assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (33, 40)
                if not sampling["temperature"]:
                    oracle.is_near_tie(body["prompt"], choice["token_ids"], oracle.greedy(body["prompt"], 40, [END]))
    assert small.metrics()["preemptions_total"] > before, "nothing was preempted: the test is empty"
    check_idle(small)


def _streamed(server: Server, **body: Any) -> dict[str, Any]:
    """A stream put together to what the whole answer is."""
    events = stream(server, **body, stream_options={"include_usage": True})
    usage = events.pop()["usage"]
    parts = [event["choices"][0] for event in events]
    ids = [token_id for part in parts for token_id in part["token_ids"]]
    choice = {"text": text_of(events), "token_ids": ids, "finish_reason": parts[-1]["finish_reason"]}
    return {"choices": [choice], "usage": usage}


def test_what_never_fits_is_refused_at_once(small: Server) -> None:
    """vLLM 39734 and 2163, FreeToken 111: it waited for ever, and everything behind it too."""
    for _ in range(3):
        begun = time.monotonic()
        error = check_error(post(small, {"prompt": [1] * 200, "max_tokens": 4}))
        assert time.monotonic() - begun < 2
        assert "--kv-blocks" in error["message"]
        check_alive(small)
    answer = ask(small, prompt=[1] * 60, max_tokens=400, **FORCED)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == LIMIT
    check_alive(small)
    answer = ask(small, prompt=[1] * 100, max_tokens=4, n=8, **FORCED)
    assert [choice["text"] for choice in answer["choices"]] == ["AAAA"] * 8
    check_alive(small)
    check_idle(small)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_borders_of_the_context_are_exact(small: Server, streamed: bool) -> None:
    """vLLM 16445 and 33418: a prompt as long as the limit was refused, and the error named a wrong one."""
    fits = [(LIMIT - 1, 1, 1), (LIMIT, 0, 0), (LIMIT - 4, 4, 4), (LIMIT - 4, 5, 4), (LIMIT - 4, None, 4)]
    for length, max_tokens, expected in fits:
        body = {"prompt": [1] * length, "max_tokens": max_tokens, "echo": max_tokens == 0, **FORCED}
        answer = _streamed(small, **body, return_token_ids=True) if streamed else ask(small, **body)
        assert answer["usage"]["completion_tokens"] == expected
        assert answer["choices"][0]["finish_reason"] == "length"
    for length, max_tokens in ((LIMIT, 1), (LIMIT + 1, 0)):
        body = {"prompt": [1] * length, "max_tokens": max_tokens, "echo": True, "stream": streamed}
        error = check_error(post(small, body))
        assert error["code"] == "context_length_exceeded"
        assert str(LIMIT) in error["message"]
        assert str(length) in error["message"]


def test_a_large_request_and_small_ones_all_get_their_turn(small: Server) -> None:
    """vLLM 33499: one large waiting request blocked small ones; nor may small ones starve it."""
    with ThreadPoolExecutor(12) as threads:
        holder = threads.submit(ask, small, prompt=[2] * 20, max_tokens=100, **FORCED)
        small.wait_for(lambda now: now["requests_running"] == 1)
        large = threads.submit(ask, small, prompt=[3] * 120, max_tokens=2, **FORCED)
        little = [threads.submit(ask, small, prompt=[4 + i], max_tokens=2, **FORCED) for i in range(10)]
        wait(little, 30, FIRST_COMPLETED)
        assert not large.done()
        for answer in (holder, large, *little):
            assert answer.result(30)["choices"][0]["finish_reason"] == "length"
    check_idle(small)


def test_what_a_template_raises_is_told(small: Server) -> None:
    """vLLM 17119, SGLang 14748: an error raised by the chat template was a 500."""
    for streaming in (False, True):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": streaming}
        error = check_error(post(small, body, CHAT))
        assert "roles must alternate" in error["message"]
        assert (error["param"], error["code"]) == ("messages", "template_failed")


def test_what_routers_read_is_one_series(small: Server) -> None:
    """vLLM 28792: with several processes one gauge appeared once a process."""
    families = {
        family.name: family
        for family in text_string_to_metric_families(httpx.get(f"{small.url}/metrics", trust_env=False).text)
    }
    for name in ("requests_running", "requests_waiting", "requests_waiting_tokens", "kv_cache_usage_ratio"):
        (sample,) = families[f"sluice_{name}"].samples
        assert sample.labels.keys() == {"model_name"}


def test_in_bfloat16_only_near_ties_depend_on_neighbours(checkpoint: Path, tmp_path: Path) -> None:
    """vLLM 5898 and 10336 in the type whose ties are wide."""
    rng = random.Random(10336)
    prompt = rng.choices(range(END), k=20)
    target = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    others = [{"prompt": rng.choices(range(END), k=k), "max_tokens": 40, "temperature": 2} for k in (1, 17, 90, 250)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()

    def check_same(one: list[int], other: list[int]) -> None:
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is not None:
            with torch.inference_mode():
                top = model(input_ids=torch.tensor([[*prompt, *one[:at]]])).logits[0, -1].float().topk(2).values
            assert float(top[0] - top[1]) < 0.1

    with (
        serving(checkpoint, tmp_path / "log", "--dtype=bfloat16", "--kv-blocks=200") as server,
        ThreadPoolExecutor(5) as threads,
    ):
        alone = ask(server, **target)["choices"][0]["token_ids"]
        running = [threads.submit(ask, server, **body) for body in others]
        among = ask(server, **target)["choices"][0]["token_ids"]
        for one in running:
            one.result(60)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, eos_token_id=None)
    check_same(alone, whole[0, len(prompt) :].tolist())
    check_same(alone, among)


# Clients that go away


def connect(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection on which `body` has been sent."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


LONG = {"prompt": "x", "max_tokens": 3000, **FORCED}


def test_nobody_generates_for_clients_that_have_gone(narrow: Server) -> None:
    """SGLang 36333, llama.cpp 11720: a request ran on to its end and kept its place."""
    for _ in range(5):
        streams = [connect(narrow, {**LONG, "stream": True}) for _ in range(2)]
        for connection in streams:
            assert b"data: " in connection.recv(65536) + connection.recv(65536)
        streams[0].close()
        reset(streams[1])
        check_alive(narrow, within=3)
    check_quiet(narrow)


def check_quiet(server: Server) -> None:
    """Nothing is generated for anybody, and everything is given back."""
    deadline = time.monotonic() + 2
    before = -1.0
    while (now := server.metrics()["generation_tokens_total"]) != before:
        assert time.monotonic() < deadline
        before = now
        time.sleep(0.1)
    check_idle(server)


@pytest.mark.parametrize("way", ["whole", "queued", "prefill", "n"])
def test_a_request_is_ended_wherever_it_is(narrow: Server, way: str) -> None:
    """ROCm/ATOM 1562: not streamed; and while it waits, while its prompt is computed, and with siblings."""
    aborts = "request_aborts_total{cause=disconnect}"
    before = narrow.settled_metrics().get(aborts, 0.0)
    bodies: list[dict[str, Any]] = {
        "whole": [LONG],
        "queued": [LONG] * 4,
        "prefill": [{**LONG, "prompt": [1] * 5000, "echo": True, "logprobs": 0}],
        "n": [{**LONG, "n": 4}],
    }[way]
    sequences = sum(body.get("n", 1) for body in bodies)
    connections = [connect(narrow, body) for body in bodies]
    running = min(2, sequences)
    narrow.wait_for(lambda now: (now["requests_running"], now["requests_waiting"]) == (running, sequences - running))
    for connection in connections:
        connection.close()
    check_alive(narrow, within=3)
    check_quiet(narrow)
    assert narrow.metrics()[aborts] - before == sequences


def test_gauges_return_to_zero_and_counters_reconcile(narrow: Server) -> None:
    """vLLM 29928, 22545, 31503, 55634: gauges kept their last busy values, and aborts were never counted."""
    before = narrow.settled_metrics()
    connections = [connect(narrow, {**LONG, "max_tokens": 2000, "stream": True}) for _ in range(20)]
    narrow.wait_for(lambda now: now["requests_running"] == 2 and now["requests_waiting"] == 18)
    for connection in connections:
        connection.close()
    first = check_idle(narrow)
    with ThreadPoolExecutor(5) as threads:
        finished = list(threads.map(lambda _: ask(narrow, prompt="x", max_tokens=5, **FORCED), range(5)))
    for _ in range(3):
        check_error(post(narrow, {"prompt": "x", "temperature": 9}))
    last = check_idle(narrow)
    for name, value in last.items():
        if name.partition("{")[0].endswith(("_total", "_count", "_bucket")):
            assert value >= first.get(name, 0.0) >= before.get(name, 0.0), name

    def grown(prefix: str) -> float:
        return sum(value - before.get(name, 0.0) for name, value in last.items() if name.startswith(prefix))

    assert grown("request_aborts_total{cause=disconnect}") == grown("requests_total{finish_reason=abort}") == 20
    assert grown("requests_total{finish_reason=length}") == len(finished)
    assert grown("request_rejections_total") == 3
    assert grown("requests_received_total") == 20 + len(finished) + 3


# The end of the server


class FailingServer(Server):
    """One whose device fails as soon as the file `trigger` exists."""


def test_an_engine_that_has_failed_is_not_healthy(checkpoint: Path, tmp_path: Path) -> None:
    """vLLM 39863 and 21728: the engine had died, health stayed 200 and requests hung."""
    trigger = tmp_path / "fail"
    FailingServer.program = ("-m", "tests.serve_failing", str(trigger))
    with (
        serving(checkpoint, tmp_path / "log", "--kv-blocks=2000", kind=FailingServer) as server,
        ThreadPoolExecutor(3) as threads,
        httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client,
    ):
        running = [threads.submit(post, server, {**LONG, "stream": True}) for _ in range(3)]
        server.wait_for(lambda now: now["requests_running"] == 3)
        assert client.get("/health").status_code == 200
        trigger.touch()
        for one in running:
            last = [line for line in one.result(10).text.split("\n") if line.startswith("data: ")][-1]
            assert "error" in json.loads(last.removeprefix("data: "))
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        begun = time.monotonic()
        refused = post(server, LONG, timeout=10)
        assert time.monotonic() - begun < 1
        assert check_error(refused, 503)["code"] == "engine_dead"
        values = server.metrics()
        assert values["requests_running"] == values["requests_waiting"] == 0
        assert values["requests_total{finish_reason=error}"] == 3


def start_four(server: Server, threads: ThreadPoolExecutor, num_tokens: int) -> list[Future[httpx.Response]]:
    """Two requests that run and two that wait, every other one streamed."""
    bodies = [{**LONG, "max_tokens": num_tokens, "stream": i % 2 == 0} for i in range(4)]
    asked = [threads.submit(post, server, body) for body in bodies]
    server.wait_for(lambda now: (now["requests_running"], now["requests_waiting"]) == (2, 2))
    return asked


def test_accepted_answers_are_finished_before_the_end(checkpoint: Path, tmp_path: Path) -> None:
    """vllm-fork 1426, vLLM 24885 and 34730: on SIGTERM all running answers were lost."""
    with (
        serving(checkpoint, tmp_path / "log", "--kv-blocks=2000", "--max-num-seqs=2") as server,
        ThreadPoolExecutor(4) as threads,
    ):
        asked = start_four(server, threads, 700)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert check_error(post(server, {"prompt": "x"}), 503)["code"] == "engine_draining"
        assert httpx.get(f"{server.url}/ready", trust_env=False).status_code == 503
        for i, one in enumerate(asked):
            response = one.result(60)
            text = text_of(events_of(response.text)) if i % 2 == 0 else response.json()["choices"][0]["text"]
            assert text == "A" * 700
        assert server.process.wait(10) == 0


def test_the_end_does_not_wait_for_ever(checkpoint: Path, tmp_path: Path) -> None:
    """The drain is bounded; what is not done by then ends with an error that says so."""
    with (
        serving(checkpoint, tmp_path / "log", "--kv-blocks=2000", "--max-num-seqs=2", "--shutdown-timeout=1") as server,
        ThreadPoolExecutor(4) as threads,
    ):
        asked = start_four(server, threads, 7000)
        server.process.send_signal(signal.SIGTERM)
        for i, one in enumerate(asked):
            response = one.result(10)
            if i % 2:
                check_error(response, 503)
            else:
                last = [line for line in response.text.split("\n") if line.startswith("data: ")][-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutdown"
        assert server.process.wait(15) == 0
