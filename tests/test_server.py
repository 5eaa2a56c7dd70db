"""A real server process on the embedded model, and real clients: the openai package and curl, 32 of them at once.

What the clients saw must be what /metrics says.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.bench.workload import load_prompts

MODEL = "SmolLM2-135M-Instruct"
NUM_CLIENTS = 32
MAX_TOKENS = 16

pytestmark = pytest.mark.embedded


class Server:
    """A `sluice serve` process on a free port."""

    program: tuple[str, ...] = ("-m", "server")

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        command = [sys.executable, *self.program, "serve", "--port=0", *flags]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.url = self._wait_for(r"listening on (http://\S+)")

    def _wait_for(self, pattern: str, timeout: float = 120.0) -> str:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.log.read_text()):
                return match[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} does not appear in:\n{self.log.read_text()}")

    def wait_until_ready(self) -> None:
        self._wait_for(r"ready: (http://\S+)")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()

    def metrics(self) -> dict[str, float]:
        """Each sample by its name and labels, model_name left out: `requests_total{finish_reason=length}`."""
        values = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text):
            for sample in family.samples:
                labels = {k: v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "endpoint")}
                shown = ",".join(f"{key}={value}" for key, value in labels.items())
                name = sample.name.removeprefix("sluice_") + (f"{{{shown}}}" if shown else "")
                values[name] = values.get(name, 0.0) + sample.value
        return values

    def settled_metrics(self) -> dict[str, float]:
        """The metrics once nothing runs, waits or holds a block."""
        idle = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        return self.wait_for(lambda now: not any(now[name] for name in idle))

    def wait_for(self, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The metrics as soon as they meet a condition."""
        for _ in range(400):
            values = self.metrics()
            if condition(values):
                return values
            time.sleep(0.05)
        raise AssertionError(f"the server does not get there: {values}")


@pytest.fixture(scope="module")
def server(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log", "--kv-bytes=256MiB", "--max-num-seqs=16")
    try:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0
    finally:
        server.process.kill()


@dataclass
class Seen:
    """What one client got."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None


def ask_with_curl(url: str, prompt: str, stream: bool) -> Seen:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    command = ["curl", "-sS", "-N", "--fail-with-body", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    answer = subprocess.run(
        [*command, "-d", "@-"], input=json.dumps(body), capture_output=True, text=True, check=True, timeout=240
    ).stdout
    if not stream:
        whole = json.loads(answer)
        choice, usage = whole["choices"][0], whole["usage"]
        return Seen(choice["text"], usage["prompt_tokens"], usage["completion_tokens"], choice["finish_reason"])
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    usage = chunks[-1]["usage"]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    return Seen(
        "".join(choice["text"] for choice in choices),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        choices[-1]["finish_reason"],
    )


async def ask_with_openai(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> Seen:
    if not stream:
        whole = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
        assert whole.usage is not None
        choice = whole.choices[0]
        return Seen(choice.text, whole.usage.prompt_tokens, whole.usage.completion_tokens, choice.finish_reason)
    seen = Seen("", 0, 0, None)
    chunks = await client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            seen.text += choice.text
            seen.finish_reason = choice.finish_reason or seen.finish_reason
        if chunk.usage is not None:
            seen.prompt_tokens, seen.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    return seen


async def ask_all(url: str, prompts: list[str]) -> list[tuple[Seen, ...]]:
    """Each prompt four ways at once: openai and curl, streamed and not."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        waiting = [
            asyncio.gather(
                ask_with_openai(client, prompt, False),
                ask_with_openai(client, prompt, True),
                loop.run_in_executor(threads, ask_with_curl, url, prompt, False),
                loop.run_in_executor(threads, ask_with_curl, url, prompt, True),
            )
            for prompt in prompts
        ]
        answers = await asyncio.gather(*waiting)
    await client.close()
    return [tuple(answer) for answer in answers]


def test_metrics_say_what_32_clients_saw(server: Server) -> None:
    prompts = load_prompts()[: NUM_CLIENTS // 4]
    before = server.settled_metrics()
    answers = asyncio.run(ask_all(server.url, prompts))
    after = server.settled_metrics()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    for four in answers:
        assert len({seen.text for seen in four}) == 1, "the same prompt was answered differently"
        assert len({(seen.prompt_tokens, seen.completion_tokens, seen.finish_reason) for seen in four}) == 1
    seen = [seen for four in answers for seen in four]
    assert grown("requests_received_total{streaming=true}") == NUM_CLIENTS // 2
    assert grown("requests_received_total{streaming=false}") == NUM_CLIENTS // 2
    for reason in ("length", "stop"):
        expected = sum(one.finish_reason == reason for one in seen)
        assert grown(f"requests_total{{finish_reason={reason}}}") == expected
    assert grown("prompt_tokens_total") == sum(one.prompt_tokens for one in seen)
    assert grown("generation_tokens_total") == sum(one.completion_tokens for one in seen)
    assert grown("time_to_first_token_seconds_count") == NUM_CLIENTS
    assert grown("inter_token_latency_seconds_count") == sum(one.completion_tokens - 1 for one in seen)
    assert grown("request_duration_seconds_count") == NUM_CLIENTS
    assert grown("request_aborts_total{cause=disconnect}") == 0
    blocks = [after[f"kv_cache_blocks{{state={state}}}"] for state in ("used", "cached", "free")]
    assert sum(blocks) == after["kv_cache_capacity_blocks"]
    assert blocks[0] == 0


def test_a_client_that_goes_away_frees_its_blocks(server: Server) -> None:
    before = server.settled_metrics()
    body = json.dumps({"prompt": "Count: 1 2 3", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sockets = []
    for _ in range(20):  # four of them must queue
        connection = socket.create_connection((host, int(port)), timeout=60)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        sockets.append(connection)
    for connection in sockets[:16]:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    server.wait_for(lambda now: (now["requests_running"], now["requests_waiting"]) == (16, 4))
    for connection in sockets:
        connection.close()
    after = server.settled_metrics()
    assert after["request_aborts_total{cause=disconnect}"] - before["request_aborts_total{cause=disconnect}"] == 20
    assert after["requests_total{finish_reason=abort}"] - before["requests_total{finish_reason=abort}"] == 20


def test_the_counters_reconcile(server: Server) -> None:
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "temperature": 3}, timeout=10)
    values = server.settled_metrics()
    received = sum(value for name, value in values.items() if name.startswith("requests_received_total"))
    finished = sum(value for name, value in values.items() if name.startswith("requests_total"))
    rejected = sum(value for name, value in values.items() if name.startswith("request_rejections_total"))
    assert received == finished + rejected
    assert rejected >= 1


def test_the_port_answers_while_the_model_loads(embedded_path: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--kv-bytes=64MiB")
    try:
        answer = httpx.get(f"{server.url}/ready", timeout=30)
        assert answer.status_code == 503
        assert answer.json()["phase"] == "loading"
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_loading"
        server.wait_until_ready()
        assert httpx.get(f"{server.url}/ready", timeout=30).status_code == 200
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_sigterm_lets_a_stream_finish(embedded_path: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--kv-bytes=64MiB")
    try:
        server.wait_until_ready()
        body = {"prompt": "Count: 1 2 3", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30)
            assert refused.status_code == 503
            assert httpx.get(f"{server.url}/ready", timeout=30).status_code == 503
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0
    finally:
        server.process.kill()


def test_a_model_that_cannot_be_served_ends_the_process_with_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "serve", str(tmp_path), "--port=0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert f"cannot serve: {tmp_path}: has no config.json" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
