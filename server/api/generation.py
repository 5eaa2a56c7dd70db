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
from server.api.wire import UsageBody, evictions, usage_body
from server.generation import EngineError, GenerationFailed, GenerationRequest, Output, QueueFull, Usage

if TYPE_CHECKING:
    from server.reports import AbortCause


_Item: TypeAlias = tuple[int, Output | Exception | None]


@contextmanager
def counting_refusal(service: Service, endpoint: str, streaming: bool) -> Iterator[None]:
    """Counts a body that is refused whole as one request, received and rejected."""
    try:
        yield
    except APIError as error:
        service.metrics.requests.received(endpoint, streaming)
        service.metrics.requests.rejected(error.reason)
        raise


@contextmanager
def preparing(service: Service, endpoint: str, streaming: bool) -> Iterator[None]:
    """Around the work between a body's arrival and its submission, which it does while holding a place in the queue.

    Raises APIError 429 before any of it if there is none; refusals are counted.
    """
    with counting_refusal(service, endpoint, streaming):
        try:
            service.engine.check_room(service.preparing + 1)
        except EngineError as error:
            raise refused(error) from error
        with holding_place(service):
            yield


@contextmanager
def holding_place(service: Service) -> Iterator[None]:
    """Around work on a body, which counts towards the queue. Raises APIError 429 for more than may be open."""
    status = service.engine.status
    if service.preparing >= status.max_num_seqs + status.max_queued_requests:
        message = (
            f"{service.preparing} bodies are being worked on, as many requests as --max-num-seqs and "
            "--max-queued-requests allow to be open."
        )
        raise refused(QueueFull(message, 1, "queue_full"))
    service.preparing += 1
    try:
        yield
    finally:
        service.preparing -= 1


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
        self._finish: dict[int, str] = {}
        self._failed = False
        self._aborted = False
        self._first_token: float | None = None
        self._closed = False
        with counting_refusal(service, requests[0].endpoint, requests[0].streaming):
            try:
                self._streams = service.engine.submit(requests)
            except EngineError as error:
                raise refused(error) from error
        exchange.submitted = time.monotonic()
        service.opened(self)
        for request in requests:
            service.metrics.requests.received(request.endpoint, request.streaming)

    @property
    def request_id(self) -> str:
        return self._exchange.request_id

    @property
    def tenant(self) -> str:
        return self._exchange.tenant

    def abort(self) -> list[str]:
        """End what still runs, on somebody's behalf who is not its reader: `outputs` raises APIError 410.

        Returns the ids of the sequences that this ended.
        """
        self._aborted = True
        for stream in self._streams:
            stream.close("api")
        return [request.request_id for choice, request in enumerate(self._requests) if choice not in self._finish]

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(choice, output) pairs as they come, until every choice has its finish reason.

        Raises APIError if a sequence fails, runs out of time with nothing to show, or is ended by the shutdown or by
        `abort`; the others end with it.
        """
        merged = self._only() if len(self._streams) == 1 else self._merged()
        try:
            async with aclosing(merged):
                async for choice, output in merged:
                    self._take(choice, output)
                    yield choice, output
            if len(self._finish) != len(self._streams):
                if self._aborted:
                    raise _aborted()
                raise GenerationFailed("The engine ended the request without an answer.")
        except EngineError as error:
            self._failed = True
            self.close("sibling")
            raise refused(error) from error
        except APIError:
            self.close("sibling")
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
        ran_out = output.finish_reason == "length" and output.stop_reason is not None
        self._finish[choice] = "deadline" if ran_out else output.finish_reason
        if output.finish_reason == "abort":
            if self._aborted:
                raise _aborted()
            raise APIError(
                503,
                "The server shut down before the answer was complete (--shutdown-timeout); ask another one.",
                code="shutdown",
                headers={"retry-after": "1"},
            )

    def usage(self) -> UsageBody:
        """Counts so far. A prompt counts once, however many choices it has; its first choice says what was cached."""
        cached = 0
        prompt_tokens = 0
        for first in range(0, len(self._requests), self._n):
            prompt_tokens += len(self._requests[first].prompt_ids)
            usage = self._usage[first]
            cached += usage.cached_tokens if usage else 0
        completion_tokens = sum(usage.completion_tokens for usage in self._usage if usage)
        evicted: int | None = None
        if self._requests[0].kv_budget is not None:  # else nothing can have been, which need not be said
            evicted = sum(usage.evicted_tokens for usage in self._usage if usage)
        return usage_body(prompt_tokens, completion_tokens, cached, evicted)

    def close(self, cause: AbortCause = "disconnect") -> None:
        """End what still runs, and leave in the log's line what there was. The first call counts."""
        if self._closed:
            return
        self._closed = True
        self._service.closed(self)
        for stream in self._streams:
            stream.close(cause)
        reasons = set(self._finish.values())
        if self._failed:
            reasons.add("error")
        elif len(self._finish) < len(self._streams):
            reasons.add("abort")
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
        notes.update(evictions(usage))
        notes["finish_reason"] = ",".join(sorted(reasons))


def _aborted() -> APIError:
    """410, since what was asked for is gone for good: OpenAI's clients would repeat a request that got 409 or 5xx."""
    return APIError(410, "The request was aborted by its id.", code="aborted", headers={"x-should-retry": "false"})


async def _pump(choice: int, stream: Stream, queue: asyncio.Queue[_Item]) -> None:
    """Moves the outputs of one sequence into the queue; None marks their end, an exception their failure."""
    try:
        async for output in stream:
            await queue.put((choice, output))
    except Exception as error:
        await queue.put((choice, error))
    else:
        await queue.put((choice, None))
