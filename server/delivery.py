"""How outputs reach the caller who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from server.generation import Output
from server.reports import AbortCause


class GenerationStream(AsyncIterator[Output]):
    """The outputs of one request, in order; ends after the one with a finish_reason.

    A reader slower than the engine gets fewer, larger outputs. Used on the loop that called `submit`.
    """

    def __init__(self, request_id: str, abort: Callable[[str, AbortCause], None], tenant: str = "") -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.queue_seconds: float | None = None  # from submission to first admission, once it has been admitted
        self._abort = abort
        self._outputs: list[Output] = []
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._ended = False

    async def __anext__(self) -> Output:
        if self._ended and not self._outputs and self._failure is None:
            raise StopAsyncIteration
        while not self._outputs:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        outputs, self._outputs = self._outputs, []
        return outputs[0] if len(outputs) == 1 else _join(outputs)

    def close(self, cause: AbortCause = "disconnect") -> None:
        """Nobody reads any more: end the request and free its blocks. Does nothing when it is over."""
        if not self._ended:
            self._ended = True
            self._abort(self.request_id, cause)

    def deliver(self, output: Output | Exception) -> None:
        """Called on the reader's loop by the engine."""
        if isinstance(output, Exception):
            self._failure = output
            self._ended = True
        else:
            self._outputs.append(output)
            self._ended = self._ended or output.finish_reason is not None
        self._changed.set()


def _join(outputs: list[Output]) -> Output:
    last = outputs[-1]
    return replace(
        last,
        text="".join(output.text for output in outputs),
        tokens=tuple(token for output in outputs for token in output.tokens),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
