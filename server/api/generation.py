"""The sequences of one HTTP request, from the engine's queue to their last outputs, as one stream.

Completions and chat differ in how they make prompts and how they write outputs; what lies between is here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from server.api.errors import APIError, refused
from server.api.exchange import Exchange
from server.api.ports import Stream
from server.api.service import Service
from server.api.watch import cancel
from server.api.wire import UsageBody, usage_body
from server.generation import EngineError, GenerationFailed, GenerationRequest, Output, Phase, Usage

if TYPE_CHECKING:
    from server.reports import AbortCause


_Item: TypeAlias = tuple[int, Output | Exception | None]


@contextmanager
def counting_refusal(service: Service, endpoint: str, streaming: bool) -> Iterator[None]:
    """Counts a body that is refused whole as one request, received and rejected."""
    try:
        yield
    except APIError as error:
        service.metrics.received(endpoint, streaming)
        service.metrics.rejected(error.reason)
        raise


class Generation:
    """All sequences of one request, those of one prompt side by side: choice `prompt * n + i`.

    Whatever way the request ends, `close` must be called; it costs nothing when all have finished.
    """

    def __init__(self, service: Service, exchange: Exchange, requests: Sequence[GenerationRequest], n: int) -> None:
        """Submits all or none. Raises APIError 429, 503 or 400 (too long); such a refusal counts as one request."""
        self._service = service
        self._exchange = exchange
        self._requests = requests
        self._n = n
        self._streams: Sequence[Stream] = ()
        self._usage: list[Usage | None] = [None] * len(requests)
        self._finish: list[str] = []
        self._first_token: float | None = None
        self._closed = False
        with counting_refusal(service, requests[0].endpoint, requests[0].streaming):
            try:
                self._streams = service.engine.submit(requests)
            except EngineError as error:
                raise refused(error) from error
        for request in requests:
            service.metrics.received(request.endpoint, request.streaming)

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(choice, output) pairs as they come, until every choice has its finish reason.

        Raises APIError if a sequence fails or is aborted, by the shutdown or by an operator; the others end with it.
        """
        merged = self._only() if len(self._streams) == 1 else self._merged()
        try:
            async with aclosing(merged):
                async for choice, output in merged:
                    self._take(choice, output)
                    yield choice, output
            if len(self._finish) != len(self._streams):
                raise GenerationFailed("The engine ended the request without an answer.")
        except EngineError as error:
            self._finish.append("error")
            self.close("api")
            raise refused(error) from error
        except APIError:
            self.close("api")
            raise

    async def _only(self) -> AsyncGenerator[tuple[int, Output], None]:
        async for output in self._streams[0]:
            yield 0, output

    async def _merged(self) -> AsyncGenerator[tuple[int, Output], None]:
        # One slot a sequence: a slow reader must hold the sequences back, so that the engine coalesces their outputs.
        queue: asyncio.Queue[_Item] = asyncio.Queue(len(self._streams))
        pumps = [asyncio.create_task(_pump(choice, stream, queue)) for choice, stream in enumerate(self._streams)]
        try:
            unfinished = len(pumps)
            while unfinished:
                choice, item = await queue.get()
                if item is None:
                    unfinished -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield choice, item
        finally:
            for pump in pumps:
                await cancel(pump)

    def _take(self, choice: int, output: Output) -> None:
        self._usage[choice] = output.usage
        if output.tokens and self._first_token is None:
            self._first_token = time.monotonic()
        if output.finish_reason is None:
            return
        self._finish.append(output.finish_reason)
        if output.finish_reason == "abort":
            if self._service.phase is not Phase.READY:
                raise APIError(
                    503,
                    "The server shut down before the answer was complete (--shutdown-timeout); ask another one.",
                    code="shutdown",
                )
            raise APIError(500, "The request was aborted by the server.", code="aborted")

    def usage(self) -> UsageBody:
        """Counts so far. A prompt counts once, however many choices it has; its first choice says what was cached."""
        cached = 0
        prompt_tokens = 0
        for first in range(0, len(self._requests), self._n):
            prompt_tokens += len(self._requests[first].prompt_ids)
            usage = self._usage[first]
            cached += usage.cached_tokens if usage else 0
        completion_tokens = sum(usage.completion_tokens for usage in self._usage if usage)
        return usage_body(prompt_tokens, completion_tokens, cached)

    def close(self, cause: AbortCause = "disconnect") -> None:
        """End what still runs, and leave in the log's line what there was. The first call counts."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.close(cause)
        if len(self._finish) < len(self._streams) and "error" not in self._finish:
            self._finish.append("abort")
        queued = [seconds for stream in self._streams if (seconds := stream.queue_seconds) is not None]
        usage = self.usage()
        notes = self._exchange.notes
        if queued:
            notes["queue_ms"] = round(min(queued) * 1000, 1)  # like ttft_ms, of the sequence that was first
        if self._first_token is not None:
            notes["ttft_ms"] = round((self._first_token - self._exchange.started) * 1000, 1)
        notes["prompt_tokens"] = usage["prompt_tokens"]
        notes["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        notes["output_tokens"] = usage["completion_tokens"]
        notes["finish_reason"] = ",".join(sorted(set(self._finish)))


async def _pump(choice: int, stream: Stream, queue: asyncio.Queue[_Item]) -> None:
    """Moves the outputs of one sequence into the queue; None marks their end, an exception their failure."""
    try:
        async for output in stream:
            await queue.put((choice, output))
    except Exception as error:
        await queue.put((choice, error))
    else:
        await queue.put((choice, None))
