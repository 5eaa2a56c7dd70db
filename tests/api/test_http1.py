"""What arrives below the routes: bytes that are no request, heads without an end, bodies with two lengths."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import h11
import pytest

from server.api import body, http1
from tests.api.conftest import PATH, Serve, Served

HOST = b"host: x\r\n"


async def raw(served: Served, *pieces: bytes) -> bytes:
    """All that comes back until the server closes, `pieces` sent one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def check_refusal(answer: bytes, status: int, code: str) -> dict[str, Any]:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    response = client.next_event()
    assert isinstance(response, h11.Response)
    assert response.status_code == status
    headers = dict(response.headers)
    assert (headers[b"content-type"], headers[b"connection"]) == (b"application/json", b"close")
    data = client.next_event()
    assert isinstance(data, h11.Data)
    assert len(data.data) < 4096
    error = json.loads(data.data)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert isinstance(client.next_event(), h11.EndOfMessage)
    assert client.trailing_data[0] == b""
    return error


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_request"),  # TLS on a plain port
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "invalid_request"),  # no Host
        (b"GET / HTTP/1.1\r\n" + HOST + b"bad header\r\n\r\n", 400, "invalid_request"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\x00c\r\n\r\n", 400, "invalid_request"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: -1\r\n\r\n", 400, "invalid_request"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, "invalid_request"),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "invalid_request",
        ),
        (
            b"HEAD / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
            400,
            "invalid_request",
        ),
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_request"),
        (
            b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: gzip, chunked\r\n\r\n",
            501,
            "unsupported_transfer_encoding",
        ),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"x" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: b\r\n" * 9_000 + b"\r\n", 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"a: " + b"x" * 40_000, 431, "headers_too_large"),  # and no end of it
    ],
)
async def test_what_is_no_request_is_answered_like_any_other(
    served: Served, sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    check_refusal(await raw(served, sent), status, code)
    labels = {"method": "OTHER", "route": "unmatched", "status": str(status), "outcome": "refused"}
    assert served.metric("http_requests_total", **labels) == 1
    (line,) = (vars(record) for record in caplog.records if record.message == "not a request")
    assert (line["status"], line["error"], line["client"]) == (status, code, "127.0.0.1")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
    assert (await served.client.get("/health")).status_code == 200


async def test_a_broken_body_ends_its_own_request(served: Served) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    check_refusal(await raw(served, head.encode(), b'5\r\n{"pro', b"\r\nzzz\r\n"), 400, "invalid_request")
    assert not served.engine.streams


@pytest.mark.parametrize(
    ("target", "status"),
    [("http://x/health", 200), ("HTTP://x:80/health?a=b", 200), ("http://x", 404), ("http://x?a", 404)],
)
async def test_a_target_may_name_the_host(served: Served, target: str, status: int) -> None:
    answer = await raw(served, f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


async def test_nothing_is_said_after_an_answer(served: Served) -> None:
    """The body of a request that is answered already breaks off: one answer, and the end."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await raw(served, head, b"zzz\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 404")


async def test_garbage_behind_a_stream_comes_after_it(served: Served) -> None:
    body = b'{"prompt":"x","stream":true,"max_tokens":3}'
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = await raw(served, head.encode() + body + b"nonsense\r\n\r\n")
    stream, _, rest = answer.partition(b"data: [DONE]\n\n")
    assert stream.count(b"data: {") == 3
    check_refusal(rest[rest.index(b"HTTP/1.1") :], 400, "invalid_request")


@pytest.mark.parametrize("begun", [b"G", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"POST / HTTP/1.1\r\nhost: x\r\na"])
async def test_a_head_without_an_end_is_not_waited_for(
    served: Served, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However steadily it drips."""
    monkeypatch.setattr(http1, "HEAD_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    writer.write(begun)

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.03)
            writer.write(b"x")

    dripping = asyncio.create_task(drip())
    answer = await asyncio.wait_for(reader.read(2**16), 5)
    dripping.cancel()
    check_refusal(answer, 408, "head_timeout")
    writer.close()


async def test_a_head_in_pieces_is_a_head(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection may then be silent for longer than a head may take, and stay."""
    monkeypatch.setattr(http1, "HEAD_SECONDS", 0.15)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    for _ in range(2):
        for piece in (b"GET /health HT", b"TP/1.1\r\nhost: x\r\n", b"\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.02)
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.3)
    writer.close()


async def test_an_upgrade_is_not_taken_up(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for upgrade in ("websocket", "h2c"):
        headers = {"connection": "upgrade, close", "upgrade": upgrade}
        assert (await served.client.get("/health", headers=headers)).status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


REFUSED = [
    ("POST", PATH, b'{"prompt":"x",y}', "application/json", 400),
    ("POST", PATH, b"", "application/json", 400),
    ("POST", PATH, b"[]", "application/json", 400),
    ("POST", PATH, b'{"prompt":"x"}', "text/plain", 415),
    ("POST", PATH, b'{"prompt":"x"}', None, 415),
    ("POST", PATH, b'{"prompt":"x","model":"none"}', "application/json", 404),
    ("GET", PATH, b"", None, 405),
    ("POST", "/nowhere", b'{"prompt":"x"}', "application/json", 404),
    ("DELETE", "/v1/models", b"x" * 100_000, None, 405),
]


@pytest.mark.parametrize("pipelined", [False, True])
async def test_one_connection_lives_through_all_refusals(serve: Serve, pipelined: bool) -> None:
    async with serve() as served:
        requests = []
        for method, path, body, content_type, _ in REFUSED:
            kind = f"content-type: {content_type}\r\n" if content_type else ""
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{kind}content-length: {len(body)}\r\n\r\n"
            requests.append(head.encode() + body)
        requests.append(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        if pipelined:
            writer.write(b"".join(requests))
        statuses = []
        for request in requests:
            if not pipelined:
                writer.write(request)
            async with asyncio.timeout(10):
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
            statuses.append(int(head.split()[1]))
            assert statuses[-1] == 200 or isinstance(body["error"]["code"], str)
        assert statuses == [*(status for *_, status in REFUSED), 200]
        assert await reader.read() == b""
        writer.close()


async def test_bodies_that_arrive_together_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else clients that draw out large bodies would take all memory, before any has a place in the queue."""
    monkeypatch.setattr(body, "_MOST_BODIES", 2)
    async with serve(max_body_size=100_000) as served:
        service = served.app.state.service
        port = int(served.url.rpartition(":")[2])
        head = b"POST " + PATH.encode() + b" HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"content-length: 100000\r\n\r\n" + b" " * 99_990)
            writers.append(writer)
        async with asyncio.timeout(10):
            while service.arriving_bytes < 2 * 99_990:
                await asyncio.sleep(0.01)
        refusal = await served.post(prompt="x")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (429, "queue_full")
        assert refusal.headers["retry-after"] == "1"
        for writer in writers:
            writer.close()
        async with asyncio.timeout(10):
            while service.arriving_bytes:
                await asyncio.sleep(0.01)
        assert (await served.post(prompt="x")).status_code == 200
