"""Server-sent events (WHATWG HTML, section 9.2), as OpenAI clients read them: one `data:` line an event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.errors import APIError, internal_error
from server.api.exchange import Exchange
from server.api.watch import DisconnectWatch, cancel

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def error_event(error: APIError) -> bytes:
    return event(error.body)


class EventStream(Response):
    """Sends the events of a generator, and a comment whenever nothing was sent for `keep_alive` seconds.

    An error of the generator becomes a last event, `{"error": ...}` or what `on_error` makes of it; no `[DONE]`
    follows, since nothing was done. When the client goes away the generator is closed at once, wherever it waits.
    `on_close` is called in any case, even if the generator never started.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        watch: DisconnectWatch,
        exchange: Exchange,
        keep_alive: float,
        headers: Mapping[str, str],
        on_error: Callable[[APIError], bytes] = error_event,
    ) -> None:
        # Nginx and its like would hold back events until a buffer is full.
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close
        self._watch = watch
        self._exchange = exchange
        self._keep_alive = keep_alive
        self._on_error = on_error
        self._sending = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            producer = asyncio.create_task(self._produce(send))
            try:
                await self._attend(producer, send)
            finally:
                await cancel(producer)
        except asyncio.CancelledError:
            self._exchange.outcome = "error"  # the server ends before the stream does
            raise
        finally:
            self._on_close()
            self._watch.close()
        if producer.cancelled():
            self._exchange.outcome = "disconnect"
        else:
            producer.result()

    async def _attend(self, producer: asyncio.Task[None], send: Send) -> None:
        """Until the producer is done or the client is gone."""
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()
        while True:
            # A producer in the midst of sending waits for a slow reader, who needs no sign of life.
            idle = 0.0 if self._sending else loop.time() - self._last_sent
            if idle >= self._keep_alive:
                await self._send(send, KEEP_ALIVE)
                idle = 0.0
            done, _ = await asyncio.wait(
                {producer, self._watch.gone}, timeout=self._keep_alive - idle, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return

    async def _produce(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    await self._send(send, data)
            except APIError as error:
                self._exchange.outcome = "error"
                self._exchange.notes["error"] = error.code
                await self._send(send, self._on_error(error))
            except Exception:
                logger.exception("request %s failed in its stream", self._exchange.request_id)
                self._exchange.outcome = "error"
                await self._send(send, self._on_error(internal_error()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sending = True
        try:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._sending = False
            self._last_sent = asyncio.get_running_loop().time()
