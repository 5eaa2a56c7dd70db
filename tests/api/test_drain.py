"""From the signal to the end: load balancers hear of it in time, and nobody who was let in goes without an answer."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time

import pytest
from prometheus_client import CollectorRegistry

from server.api import server as life
from server.api.app import create_app
from server.api.server import bind, http_config
from server.config import ServeSettings
from server.metrics import Metrics
from tests.api.conftest import PATH, Serve, Served, parse_events
from tests.api.fake_engine import FakeEngine
from tests.api.test_server import Process, started

REQUEST = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def request_bytes(**fields: object) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 2, **fields}).encode()
    return REQUEST % (PATH.encode(), len(body), body)


async def connected(server: Process) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(str(server.client.base_url).rpartition(":")[2].strip("/")))


async def test_new_requests_are_served_while_load_balancers_leave() -> None:
    async with started(drain_delay=1.0) as server:
        await server.says("ready: http")
        assert "connection" not in (await server.post()).headers
        server.process.send_signal(signal.SIGTERM)
        await server.says("SIGTERM: not ready any more; taking requests for 1 seconds")
        ready = await server.client.get("/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "draining")
        assert "--drain-delay" in ready.json()["detail"]
        assert (await server.client.get("/health")).status_code == 200
        assert (await server.client.get("/v1/models")).status_code == 200
        late = await server.post(max_tokens=3)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        stream = asyncio.create_task(server.post(max_tokens=150, stream=True))
        await server.says("after 1 seconds: finishing open requests, for up to 20 seconds")
        refused = await server.post()
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) > 0
        assert (await server.client.get("/health")).status_code == 200
        assert parse_events((await stream).text)[-1] == "[DONE]"
        assert await server.exit_code() == 0


async def test_a_second_signal_ends_the_delay_and_all_else() -> None:
    async with started(drain_delay=60) as server:
        await server.says("ready: http")
        server.process.send_signal(signal.SIGTERM)
        await server.says("taking requests for 60 seconds")
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 128 + signal.SIGTERM


async def test_nobody_waits_for_a_server_that_was_never_ready() -> None:
    async with started(drain_delay=60, load="hang") as server:
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        assert "taking requests" not in server.log


async def test_a_request_on_an_idle_connection_is_answered_until_the_end() -> None:
    """The port is closed already, and the connection is one that a proxy keeps."""
    async with started() as server:
        await server.says("ready: http")
        reader, writer = await connected(server)
        writer.write(request_bytes())
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        server.process.send_signal(signal.SIGTERM)
        while True:
            try:
                (await connected(server))[1].close()
            except ConnectionError:  # refused, or reset at the very moment of closing
                break
        writer.write(request_bytes())
        answer = await reader.read()
        assert b"HTTP/1.1 503 " in answer
        assert b"connection: close" in answer
        writer.close()
        assert await server.exit_code() == 0


async def test_connections_that_only_the_kernel_has_accepted_are_answered() -> None:
    """Their requests may be on the wire when the port closes: a reset would leave the client in doubt."""
    listener = bind("127.0.0.1", 0)
    metrics = Metrics(CollectorRegistry(), "tiny")
    http = life._Uvicorn(http_config(create_app(FakeEngine(), metrics, ServeSettings(model="tiny"))))
    http.config.load()
    http.lifespan = http.config.lifespan_class(http.config)
    await http.startup([listener])
    clients = [socket.create_connection(listener.getsockname()[:2], timeout=10) for _ in range(20)]
    for client in clients:
        client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await http.shutdown([listener])
    for client in clients:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.close()


async def test_clients_that_come_back_without_a_pause_do_not_hold_up_the_end() -> None:
    """There is always one that only the kernel has accepted, and each round of the loop takes its time."""
    listener = bind("127.0.0.1", 0)
    http = life._Uvicorn(http_config(create_app(FakeEngine(), Metrics(CollectorRegistry(), "tiny"), ServeSettings())))
    http.config.load()
    http.lifespan, http.servers = http.config.lifespan_class(http.config), []

    async def answer() -> None:
        while True:
            time.sleep(0.003)  # noqa: ASYNC251 - it is what an answer does to the loop
            await asyncio.sleep(0)

    answering = asyncio.create_task(answer())
    with socket.create_connection(listener.getsockname()[:2], timeout=10):
        begun = time.monotonic()
        await http.shutdown([listener])
        assert time.monotonic() - begun < 4
    answering.cancel()


async def test_what_is_being_prepared_is_let_in(serve: Serve) -> None:
    """The engine hears of the drain only when a request that waits for a tokenizer has reached it."""
    async with serve() as served:
        service = served.app.state.service
        service.leaving = service.draining = True
        service.preparing += 1
        drain = asyncio.create_task(life._drain(service, 10.0))
        await asyncio.sleep(0.05)
        assert served.engine.drained_with is None
        service.preparing -= 1
        await drain
        assert served.engine.drained_with == pytest.approx(10, abs=2)


async def test_what_is_being_prepared_has_no_longer_than_the_rest(serve: Serve) -> None:
    async with serve() as served:
        served.app.state.service.preparing += 1
        await life._drain(served.app.state.service, 0.05)
        assert served.engine.drained_with == 0


async def test_a_large_body_does_not_hide_why_it_is_refused(served: Served) -> None:
    """A connection closed over unread bytes is reset, and its reader sees that instead of the answer."""
    served.app.state.service.leaving = served.app.state.service.draining = True

    def send() -> bytes:
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=10) as client:
            client.sendall(request_bytes(prompt="x" * 6_000_000))
            return b"".join(iter(lambda: client.recv(65536), b""))

    answer = await asyncio.to_thread(send)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"engine_draining"' in answer
