"""A client that goes away, whenever and however, has all its sequences closed at once."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from typing import Any

import pytest

from tests.api.conftest import PATH, Serve, Served
from tests.api.fake_engine import ByteTokenizer, FakeEngine


async def send(served: Served, body: dict[str, Any], *, cut: int | None = None) -> socket.socket:
    """A connection on which a request has been sent, up to `cut` bytes before its end."""
    host, port = served.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    client.setblocking(False)
    data = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(client, (head.encode() + data)[: -cut if cut else None])
    return client


async def read(client: socket.socket, count: int) -> bytes:
    """At least `count` events, or all of an answer."""
    data = b""
    while data.count(b"data: ") < count:
        data += await asyncio.get_running_loop().sock_recv(client, 65536)
    return data


def hang_up(client: socket.socket, how: str) -> None:
    if how == "rst":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def until_counted(served: Served, status: str) -> None:
    """Until the books show one request of this status that the client gave up."""
    labels = {"method": "POST", "route": PATH, "status": status, "outcome": "disconnect"}
    while served.metric("http_requests_total", **labels) != 1:
        await asyncio.sleep(0.005)


async def check_gone(served: Served, sequences: int) -> None:
    engine = served.engine
    await engine.until(lambda: len(engine.streams) == sequences and not engine.open)
    assert [stream.closed_by for stream in engine.streams] == ["disconnect"] * sequences
    engine.release()
    answer = await served.complete(prompt="x", max_tokens=2, logit_bias={"49": 100})
    assert answer["choices"][0]["text"] == "11"


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_token(served: Served, how: str, n: int, stream: bool) -> None:
    """Queued or in its prompt: to HTTP both are silence."""
    served.engine.gate.clear()
    client = await send(served, {"prompt": ["x", "y"], "n": n, "stream": stream, "max_tokens": 30})
    await served.engine.until(lambda: len(served.engine.open) == 2 * n)
    if stream:
        assert (await asyncio.get_running_loop().sock_recv(client, 15)).startswith(b"HTTP/1.1 200")
    hang_up(client, how)
    await check_gone(served, 2 * n)


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("n", [1, 4])
async def test_in_the_midst_of_a_stream(served: Served, how: str, n: int) -> None:
    served.engine.step_seconds = 0.01
    client = await send(served, {"prompt": "x", "n": n, "stream": True, "max_tokens": 60})
    await read(client, 2 * n)
    served.engine.gate.clear()  # silence, then the end
    hang_up(client, how)
    await check_gone(served, n)
    await until_counted(served, "200")


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_in_the_midst_of_an_answer_that_is_not_streamed(served: Served, how: str) -> None:
    served.engine.step_seconds = 0.005
    client = await send(served, {"prompt": "x", "n": 3, "max_tokens": 60})
    await served.engine.until(lambda: len(served.engine.open) == 3)
    await asyncio.sleep(0.02)
    hang_up(client, how)
    await check_gone(served, 3)
    await until_counted(served, "499")


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_reader_that_stopped_reading(serve: Serve, how: str) -> None:
    """Its sockets are full, so the server is stuck in sending."""
    async with serve(FakeEngine(max_model_len=10_000)) as served:
        body = {"prompt": "x", "n": 2, "stream": True, "max_tokens": 8000, "logprobs": 20}
        client = await send(served, body)
        await read(client, 1)
        sent = -1
        while sent != (sent := sum(s.sent for s in served.engine.streams)):
            await asyncio.sleep(0.1)
        assert sent < 16_000  # the reader holds the sequences back
        hang_up(client, how)
        await check_gone(served, 2)


@pytest.mark.parametrize("stream", [True, False])
async def test_while_the_prompt_is_tokenized(served: Served, stream: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            begun.set()
            go_on.wait(20)
            return super().encode(text, add_special_tokens)

    served.engine.bytes = Slow()
    client = await send(served, {"prompt": "x", "stream": stream})
    await asyncio.to_thread(begun.wait, 20)
    assert (await served.client.get("/health")).status_code == 200  # the loop is free meanwhile
    hang_up(client, "fin")
    await until_counted(served, "499")
    go_on.set()
    served.engine.bytes = ByteTokenizer()
    await served.complete(prompt="x")
    assert len(served.engine.streams) == 1
    assert served.metric("requests_received_total", endpoint="completions", streaming="false") == 1


async def test_while_the_body_is_sent(served: Served) -> None:
    client = await send(served, {"prompt": "x" * 1000}, cut=10)
    await asyncio.sleep(0.02)
    hang_up(client, "rst")
    await until_counted(served, "499")
    assert not served.engine.streams


async def test_fifty_times(served: Served) -> None:
    engine = served.engine
    engine.step_seconds = 0.001
    for round_ in range(50):
        clients = [await send(served, {"prompt": "x", "stream": True, "max_tokens": 60}) for _ in range(2)]
        for client in clients:
            await read(client, 1)
            hang_up(client, "fin" if round_ % 2 else "rst")
        await served.complete(prompt="x", max_tokens=1)
    await engine.until(lambda: not engine.open)
    tasks = [task for task in asyncio.all_tasks() if "server.api" in repr(task.get_coro())]
    assert not tasks
