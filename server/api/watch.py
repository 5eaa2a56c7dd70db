"""Noticing that a client has gone away, whatever the server is doing for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from server.api.errors import ClientGone

T = TypeVar("T")


class DisconnectWatch:
    """Waits for the end of the connection, from the end of the request's body until `close`."""

    def __init__(self, receive: Receive) -> None:
        self.gone = asyncio.create_task(self._wait(receive))

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the client goes away first, `work` is cancelled and ClientGone raised."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self.gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            await cancel(task)

    def close(self) -> None:
        self.gone.cancel()


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, if it still runs, and wait until it has cleaned up. Its outcome is of no interest any more."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # else asyncio would log that nobody asked for it
