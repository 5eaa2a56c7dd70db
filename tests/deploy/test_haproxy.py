"""deploy/haproxy.cfg in a real HAProxy: what it retries, and that it holds no token back."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from loadtest.replicas import HAPROXY_CONFIG, Replica, haproxy
from tests.programs import program

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
REFUSED = b"HTTP/1.1 503 Not now\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno"


@pytest.fixture(scope="module", autouse=True)
def haproxy_program() -> str:
    return program("haproxy", "haproxy")


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[Replica]:
    """Says yes to every GET, so that it is ready, and answers a POST, read whole, as it is told."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                writer.write(OK)
            else:
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
                await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # a check that only connects
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield Replica("server", listener.sockets[0].getsockname()[1], [], Path())


def saying(answer: bytes) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return write


@asynccontextmanager
async def proxied(one: Answer, other: Answer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of HAProxy in front of two servers."""
    async with (
        server(one) as first,
        server(other) as second,
        haproxy((first, second)) as (proxy, _),
        httpx.AsyncClient(base_url=proxy.url, trust_env=False) as client,
    ):
        yield client


async def statuses(bad: bytes, size: int) -> set[int]:
    """What clients of two servers, one of which answers with `bad`, get for bodies of `size` bytes."""
    async with proxied(saying(bad), saying(OK)) as client:
        return {(await client.post("/v1/completions", content=b"x" * size)).status_code for _ in range(4)}


def test_the_file_is_valid_without_a_warning(haproxy_program: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    command = [haproxy_program, "-c", "-f", str(HAPROXY_CONFIG)]
    checked = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr, checked.stderr


@pytest.mark.parametrize("bad", [REFUSED, b""], ids=["503", "no answer"])
async def test_what_was_not_served_is_sent_to_another_server(bad: bytes) -> None:
    """Also where the body is larger than one packet."""
    assert await statuses(bad, 100_000) == {200}


async def test_a_body_larger_than_the_buffer_is_served_but_not_retried() -> None:
    assert await statuses(REFUSED, 1_000_000) == {200, 503}


async def test_a_refusal_for_the_client_is_not_retried() -> None:
    assert await statuses(REFUSED.replace(b"503", b"429"), 100) == {200, 429}


async def test_tokens_are_sent_on_as_they_come() -> None:
    seen = asyncio.Event()

    async def stream(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await seen.wait()  # nothing more comes until the client has this
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    async with proxied(stream, stream) as client, client.stream("POST", "/v1/completions", content=b"x") as response:
        chunks = response.aiter_text()
        assert await anext(chunks) == "data: 1\n\n"
        seen.set()
        assert await anext(chunks) == "data: 2\n\n"


async def test_metrics_are_of_the_proxy_not_of_a_server_at_random() -> None:
    async with server(saying(OK)) as first, server(saying(OK)) as second, haproxy((first, second)) as (proxy, stats):
        assert (await proxy.client.request("GET", "/metrics")).status == 404
        text = (await stats.request("GET", "/metrics")).body.decode()
    assert "haproxy_backend_active_servers" in text
