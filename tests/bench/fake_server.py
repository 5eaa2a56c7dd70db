"""A small OpenAI-compatible server that behaves, or misbehaves, as it is told.

Run as `python -m tests.bench.fake_server --host=H --port=P` it stands in for `sluice serve` in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

Handler = Callable[["Exchange"], Awaitable[None]]

METRICS = b"""\
sluice_kv_cache_fragmentation_ratio{model_name="fake"} 0.03125
sluice_kv_cache_blocks{model_name="fake",state="used"} 4.0
"""


class Exchange:
    """One request and the means to answer it."""

    def __init__(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> None:
        self.method, self.path, self.headers = method, path, headers
        self.body: dict[str, Any] = json.loads(body) if body else {}
        self._writer = writer

    def respond(self, status: int, payload: object) -> None:
        self.raw(status, json.dumps(payload).encode())

    def raw(self, status: int, body: bytes) -> None:
        self._writer.write(
            b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
        )

    def begin(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n"
        self._writer.write(head + b"Content-Type: text/event-stream\r\n\r\n")

    def event(self, payload: object) -> None:
        data = payload if isinstance(payload, str) else json.dumps(payload)
        block = f"data: {data}\n\n".encode()
        self._writer.write(b"%x\r\n%s\r\n" % (len(block), block))

    def text(self, text: str, total: int | None = None, finish_reason: str | None = None) -> None:
        chunk: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
        if total is not None:
            chunk["usage"] = self.usage(total)
        self.event(chunk)

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = self.body.get("prompt") or self.body["messages"][0]["content"]
        tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        return {"prompt_tokens": tokens, "completion_tokens": completion_tokens}

    def done(self, completion_tokens: int | None = None) -> None:
        if completion_tokens is not None:
            self.event({"choices": [], "usage": self.usage(completion_tokens)})
        self.event("[DONE]")
        self.end()

    def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")

    def cut(self) -> None:
        self._writer.close()


async def well_behaved(exchange: Exchange) -> None:
    """Lists a model and streams exactly `max_tokens` words, one a chunk."""
    if exchange.path == "/v1/models":
        exchange.respond(200, {"object": "list", "data": [{"id": "fake"}]})
    elif exchange.path == "/ready":
        exchange.respond(200, {"status": "ready"})
    elif exchange.path == "/metrics":
        exchange.raw(200, METRICS)
    elif exchange.path == "/v1/completions":
        wanted = exchange.body["max_tokens"]
        exchange.begin()
        for number in range(1, wanted + 1):
            exchange.text(" word", number, "length" if number == wanted else None)
            await asyncio.sleep(0)
        exchange.done(wanted)
    else:
        exchange.respond(404, {"error": {"message": f"no {exchange.path}"}})


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve with `handler` on this loop; gives the URL."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await handler(Exchange(method, path, headers, body, writer))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client went away
        finally:
            writer.close()

    server = await asyncio.start_server(connected, host, port)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def note_pid(path: Path) -> None:
    path.write_text(str(os.getpid()))


async def main() -> None:
    """Serve until terminated.

    `--die` ends at once as a server that cannot start, `--crash` at the first request for more than a token;
    `--plain` takes OpenAI's own fields alone; `--note FILE` writes our pid.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--note")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    options = parser.parse_args()
    if options.die:
        sys.exit("the model cannot be loaded")
    if options.note:
        note_pid(Path(options.note))

    async def crashing(exchange: Exchange) -> None:
        if exchange.body.get("max_tokens", 1) > 1:
            print("out of memory", flush=True)
            os._exit(3)
        await well_behaved(exchange)

    async def plain(exchange: Exchange) -> None:
        if "ignore_eos" in exchange.body:
            exchange.respond(400, {"error": {"message": "unknown field ignore_eos"}})
        else:
            await well_behaved(exchange)

    async with serving(
        crashing if options.crash else plain if options.plain else well_behaved, options.host, options.port
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
