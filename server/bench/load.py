"""Drives load: so many requests at a time (closed loop), or requests at random moments (open loop)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.bench.client import BenchError, Client
from server.bench.record import Record
from server.bench.workload import PROBE_EXTRAS, Workload

Progress = Callable[[int, int], None]
"""Called with (finished, failed) each time a request ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run stops sending; what is under way then still finishes. At least one of the two is set."""

    requests: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The requests of one load, in the order they were sent, and what the client itself used of the CPU."""

    records: tuple[Record, ...]
    client_cpu_seconds: float

    @property
    def seconds(self) -> float:
        """From the first request sent to the last one ended."""
        sent = [record.sent for record in self.records if record.sent is not None]
        ended = [record.ended for record in self.records if record.ended is not None]
        return max(ended) - min(sent) if ended else 0.0


async def closed_loop(
    client: Client, workload: Workload, concurrency: int, limits: Limits, progress: Progress = lambda *_: None
) -> Run:
    """`concurrency` users, each sending its next request as soon as its last one ended."""
    bodies = itertools.islice(workload.bodies(), limits.requests)
    start, cpu = client.clock(), time.process_time()
    tally = _Tally(progress)

    async def user() -> None:
        for body in bodies:
            if limits.seconds is not None and client.clock() - start >= limits.seconds:
                return
            tally.add(await client.stream(workload.path, body))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, limits.requests or concurrency)):
            group.create_task(user())
    return tally.run(cpu)


async def open_loop(
    client: Client, workload: Workload, arrivals: Iterator[float], limits: Limits, progress: Progress = lambda *_: None
) -> Run:
    """Sends each request when it is due (`arrivals`, seconds after the start), however many are still unanswered."""
    bodies = itertools.islice(workload.bodies(), limits.requests)
    cpu = time.process_time()
    tally = _Tally(progress)
    start = client.clock()

    async def one(body: bytes, intended: float) -> None:
        tally.add(await client.stream(workload.path, body, intended))

    async with asyncio.TaskGroup() as group:
        for body, due in zip(bodies, arrivals, strict=False):
            if limits.seconds is not None and due >= limits.seconds:
                break
            await asyncio.sleep(start + due - client.clock())
            group.create_task(one(body, start + due))
    return tally.run(cpu)


class _Tally:
    def __init__(self, progress: Progress) -> None:
        self._records: list[Record] = []
        self._failed = 0
        self._progress = progress

    def add(self, record: Record) -> None:
        self._records.append(record)
        self._failed += record.failure is not None
        self._progress(len(self._records), self._failed)

    def run(self, cpu_before: float) -> Run:
        ordered = sorted(self._records, key=lambda record: record.sent or 0.0)
        return Run(tuple(ordered), time.process_time() - cpu_before)


async def model_of(client: Client) -> str:
    """The first model the server lists."""
    try:
        response = await client.request("GET", "/v1/models")
        if response.status != 200:
            raise BenchError(f"{client.url}/v1/models answered {response.error}")
        return str(response.json()["data"][0]["id"])
    except (OSError, TimeoutError) as error:
        raise BenchError(f"{client.url} does not answer: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{client.url}/v1/models lists no model: name one with --model") from None


async def probe(client: Client, workload: Workload) -> list[str]:
    """Find out what the server accepts and set `workload.extras` to it; returns what had to be left out.

    Raises BenchError where not even a plain streamed request of one token succeeds.
    """
    refusal = ""
    for extras in PROBE_EXTRAS:
        workload.extras = extras
        record = await client.stream(workload.path, workload.encode("Hello", 1))
        if record.failure is None:
            missing = ["ignore_eos"] if "ignore_eos" not in extras else []
            if "stream_options" not in extras:
                missing.append("stream_options.include_usage")
            elif "continuous_usage_stats" not in extras["stream_options"]:
                missing.append("stream_options.continuous_usage_stats")
            return missing
        refusal = record.failure
        if record.status not in (400, 422):
            break
    raise BenchError(f"{client.url}{workload.path} does not serve {workload.model!r}: {refusal}")


async def count_tokens(client: Client, workload: Workload, prompt: str) -> int:
    """Tokens of a prompt as the server counts them. Raises BenchError where it does not."""
    record = await client.stream(workload.path, workload.encode(prompt, 1))
    if record.failure is not None:
        raise BenchError(f"the server does not take a prompt of {len(prompt)} characters: {record.failure}")
    if record.prompt_tokens is None:
        raise BenchError("the server reports no usage, so the tokens of a prompt cannot be counted")
    return record.prompt_tokens
