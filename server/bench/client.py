"""An asyncio client for streamed completions that costs the machine little.

It speaks HTTP/1.1 over an asyncio protocol, without a general client's layers of streams, pools and models.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from server.bench.http1 import ProtocolError, ResponseParser
from server.bench.record import Record
from server.bench.stream import CompletionStream, error_message

READ_SIZE = 16384


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do, `status` is what the command exits with."""

    status = 1


@dataclass(frozen=True, slots=True)
class Response:
    """A response read whole."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return f"HTTP {self.status}: {error_message(self.body)}"


class Client:
    """Requests to one server, each on a connection of its own, so a time to first token includes the connecting.

    url: where the server lives, with or without `/v1` at the end.
    timeout: seconds a request may take in all before it is given up as failed.
    clock: seconds, monotonic; every time in a `Record` is read from it.
    done_event: whether a stream without `[DONE]` at its end is cut, as OpenAI's would be; some servers never send it.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
        done_event: bool = True,
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"--url {url!r} is not an http or https address")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.timeout = timeout
        self.clock = clock
        self.done_event = done_event
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        authority = f"[{self.host}]" if ":" in self.host else self.host
        if parts.port:
            authority += f":{parts.port}"
        self.url = f"{parts.scheme}://{authority}{self.base}"
        self._headers = f"Host: {authority}\r\nUser-Agent: sluice-bench\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def stream(self, path: str, body: bytes, intended: float | None = None) -> Record:
        """POST `body` and read the event stream to its end; `intended` is when it was due (now unless given).

        Never raises for what a server or network does wrong: the record's `failure` says what happened.
        """
        sent = self.clock()
        record = Record(intended=sent if intended is None else intended, sent=sent)
        stream = CompletionStream(record, self.done_event)
        try:
            async with asyncio.timeout(self.timeout):
                await self._exchange(self._request("POST", path, body), stream.feed, lambda: stream.closed)
        except TimeoutError:
            record.fail(f"no end of the stream within {self.timeout:g} s")
        except OSError as error:
            record.fail(f"connection failed: {error.strerror or error}")
        stream.finish(self.clock())
        return record

    async def request(self, method: str, path: str, payload: object = None) -> Response:
        """Send a request and read the response whole; raises OSError or TimeoutError where there is none."""
        parser = ResponseParser()
        parts: list[bytes] = []
        body = b"" if payload is None else json.dumps(payload).encode()
        async with asyncio.timeout(self.timeout):
            await self._exchange(
                self._request(method, path, body),
                lambda data, _: parts.append(parser.feed(data)),
                lambda: parser.complete,
            )
        if parser.status is None or not parser.feed_eof():
            raise ConnectionError(f"{self.url}{path}: connection closed within the response")
        return Response(parser.status, b"".join(parts))

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {self.base}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n"
        if body:
            head += "Content-Type: application/json\r\n"
        return head.encode("latin-1") + b"\r\n" + body

    async def _exchange(self, request: bytes, feed: Callable[[bytes, float], None], closed: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        transport, _ = await loop.create_connection(
            lambda: _Exchange(feed, closed, self.clock, over), self.host, self.port, ssl=self._ssl
        )
        try:
            transport.write(request)
            await over
        finally:
            transport.abort()


class _Exchange(asyncio.BufferedProtocol):
    """Hands each read with its time to `feed` until that is satisfied or the connection ends.

    A buffer of its own spares the 256 KiB that an ordinary protocol allocates for each read of a chunk of 300 bytes.
    """

    def __init__(
        self,
        feed: Callable[[bytes, float], None],
        closed: Callable[[], bool],
        clock: Callable[[], float],
        over: asyncio.Future[None],
    ) -> None:
        self._feed = feed
        self._closed = closed
        self._clock = clock
        self._over = over
        self._buffer = bytearray(READ_SIZE)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._over.done():
            return
        try:
            self._feed(bytes(self._buffer[:nbytes]), self._clock())
        except ProtocolError as error:
            self._over.set_exception(ConnectionError(str(error)))
            return
        if self._closed():
            self._over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over.done():
            self._over.set_result(None)
