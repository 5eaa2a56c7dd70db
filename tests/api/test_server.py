"""The process: answers from the start, drains at a signal, leaves with the right code."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from server.api import server as server_module
from server.api.server import bind, serve, url_of
from server.config import ServeSettings
from server.metrics import Metrics
from tests.api.conftest import PATH, parse_events

ROOT = Path(__file__).parents[2]


class Process:
    """A server process; `client` speaks to it, `log` is what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process, client: httpx.AsyncClient) -> None:
        self.process = process
        self.client = client
        self.log = ""

    async def says(self, pattern: str) -> str:
        assert self.process.stdout is not None
        while not (match := re.search(pattern, self.log)):
            line = await self.process.stdout.readline()
            assert line, f"no {pattern!r} in:\n{self.log}"
            self.log += line.decode()
        return match[0]

    async def exit_code(self) -> int:
        assert self.process.stdout is not None
        self.log += (await self.process.stdout.read()).decode()
        return await self.process.wait()

    async def post(self, **body: Any) -> httpx.Response:
        return await self.client.post(PATH, json={"prompt": "x", **body})


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.api.serve_fake", json.dumps(options),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            server = Process(process, client)
            client.base_url = await server.says(r"http://\S+")
            yield server
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_port_answers_while_loading() -> None:
    async with started() as server:
        response = await server.client.get("/health")
        assert (response.status_code, response.json()["detail"]) == (503, "reading weights")
        assert (await server.post()).json()["error"]["code"] == "engine_loading"
        await server.says("ready: http")
        assert (await server.client.get("/ready")).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert await server.exit_code() == 0
        assert "uvicorn" not in server.log


async def test_a_signal_lets_open_requests_finish() -> None:
    async with started() as server:
        await server.says("ready: http")
        streamed, whole = (asyncio.create_task(server.post(max_tokens=100, stream=stream)) for stream in (True, False))
        async with server.client.stream("POST", PATH, json={"prompt": "x", "stream": True, "max_tokens": 100}) as third:
            chunks = third.aiter_text()
            await anext(chunks)
            server.process.send_signal(signal.SIGTERM)
            await server.says("SIGTERM: finishing")
            assert (await server.client.get("/ready")).status_code == 503
            assert (await server.client.get("/health")).status_code == 200
            refused = await server.post()
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert refused.json()["error"]["code"] == "engine_draining"
            rest = "".join([chunk async for chunk in chunks])
        assert rest.endswith("data: [DONE]\n\n")
        assert len(parse_events((await streamed).text)) == 101
        assert (await whole).json()["usage"]["completion_tokens"] == 100
        assert await server.exit_code() == 0
        assert "still open" not in server.log


async def test_a_step_that_hangs_is_told_in_the_log() -> None:
    async with started() as server:
        await server.says("ready: http")
        server.process.send_signal(signal.SIGUSR1)
        await server.says("a step has not ended for 61 seconds")
        assert (await server.client.get("/health")).status_code == 503
        server.process.send_signal(signal.SIGUSR1)
        await server.says("the step that took more than 61 seconds is over")
        assert (await server.client.get("/health")).status_code == 200


async def test_a_drain_has_an_end() -> None:
    async with started(shutdown_timeout=0.3) as server:
        await server.says("ready: http")
        streamed, whole = (asyncio.create_task(server.post(max_tokens=9000, stream=stream)) for stream in (True, False))
        while (await server.client.get("/health")).json()["running"] < 2:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert parse_events((await streamed).text)[-1]["error"]["code"] == "shutdown"
        assert (await whole).status_code == 503
        assert await server.exit_code() == 0
        assert "still open after 0.3 seconds" in server.log


async def test_a_second_signal_ends_at_once() -> None:
    async with started() as server:
        await server.says("ready: http")
        request = {"prompt": "x", "stream": True, "max_tokens": 9000}
        async with server.client.stream("POST", PATH, json=request) as response:
            await anext(response.aiter_text())
            server.process.send_signal(signal.SIGTERM)
            await server.says("SIGTERM: finishing")
            server.process.send_signal(signal.SIGTERM)
            assert await server.exit_code() == 128 + signal.SIGTERM


async def test_a_signal_while_loading_does_not_wait_for_the_loader() -> None:
    async with started(load="hang") as server:
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0


async def test_a_model_that_cannot_load_ends_the_process() -> None:
    async with started(load="fail") as server:
        assert await server.exit_code() == 1
        assert "bloom is not supported" in server.log


async def test_a_chat_template_that_cannot_be_used_ends_the_process() -> None:
    async with started(chat_template="nowhere") as server:
        assert await server.exit_code() == 1
        assert "--chat-template 'nowhere' is no Jinja source" in server.log


async def test_an_engine_that_does_not_end_is_left_behind() -> None:
    async with started(stop_hangs=True) as server:
        await server.says("ready: http")
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0  # every request was drained, and nothing depends on what does not end
        assert "does not end" in server.log


def test_a_port_in_use_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.ERROR):
            assert serve(ServeSettings(model="tiny", port=port)) == 1
    assert f"127.0.0.1:{port}" in caplog.text
    assert "--port" in caplog.text


def test_a_host_that_does_not_exist_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert serve(ServeSettings(model="tiny", host="256.1.1.1")) == 1
    assert "256.1.1.1" in caplog.text


def test_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", url_of(listener))


def test_nothing_heavy_is_imported_before_the_port_answers() -> None:
    code = (
        "import sys, server.api.server, server.engine; print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


async def test_running_out_of_descriptors_is_survived_quietly() -> None:
    """It is said a few times a second, a running stream goes on, and afterwards everyone is served."""
    async with started(max_descriptors=60) as server:
        await server.says("ready: http")
        host, port = str(server.client.base_url).removeprefix("http://").split(":")
        body = {"prompt": "x", "max_tokens": 150, "stream": True}
        async with server.client.stream("POST", PATH, json=body) as response:
            idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(90)]
            events = parse_events((await response.aread()).decode())
        assert events[-1] == "[DONE]"
        for connection in idle:
            connection.close()
        async with asyncio.timeout(20):
            assert (await server.post()).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        assert 0 < server.log.count("out of system resource") < 100


async def test_a_loop_that_is_held_up_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LAG_SECONDS", 0.01)
    registry = CollectorRegistry()
    watch = asyncio.create_task(server_module._watch_lag(Metrics(registry, "tiny")))
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 - nothing else may run meanwhile
    await asyncio.sleep(0.05)
    watch.cancel()
    lag = registry.get_sample_value("sluice_event_loop_lag_seconds_sum", {"model_name": "tiny"})
    assert lag is not None
    assert 0.25 < lag < 3
