"""The event loop stays free, whatever arrives: a real server on the embedded model, asked for its health meanwhile."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.probe import long_prompt, measure_health, run
from tests.test_server import Server

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def port(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server = Server(tmp_path_factory.mktemp("server") / "log", "--kv-bytes=512MiB")
    try:
        server.wait_until_ready()
        yield int(server.url.rpartition(":")[2])
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_health_while_64_long_prompts_arrive(port: int) -> None:
    """`python -m loadtest.probe` says how fast it is on a machine that does nothing else; this one may be busy."""
    in_peace, under_load, statuses = run("127.0.0.1", port, prompts=64, tokens=8000, seconds=6.0)
    assert statuses == [200] * 64
    assert under_load.at(0.99) < 0.3, f"{under_load}; in peace: {in_peace}"


def test_health_while_5_mb_are_tokenized(port: int) -> None:
    body = json.dumps({"prompt": long_prompt(1_000_000, 1)})
    assert len(body) > 5_000_000
    answers: list[tuple[int, int]] = []

    def ask(path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        answers.append((response.status, json.loads(response.read()).get("count", 0)))
        connection.close()

    asking = [threading.Thread(target=ask, args=(path,)) for path in ("/tokenize", "/v1/completions", "/tokenize")]
    for thread in asking:
        thread.start()
    latencies = measure_health("127.0.0.1", port, 5.0)
    for thread in asking:
        thread.join()
    assert sorted(answers) == [(200, 1_000_000), (200, 1_000_000), (400, 0)]
    assert latencies.at(1.0) < 1.0, str(latencies)
