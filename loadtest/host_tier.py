"""Does a preempted long request come back sooner from host memory than by computing it again, with the same tokens?

    python -m loadtest.host_tier                              # the embedded model
    python -m loadtest.host_tier --tokens 4000 -- Qwen/Qwen3-0.6B

starts three servers with the same small pool: one without host memory, one with enough of it, and one with so little
that it is always full. On each in turn, the order changing from turn to turn,

1. a crowd of sequences starts to generate, then a request with a long prompt;
2. the crowd grows until the pool is out of blocks, and the newest request, the long one, is preempted; what it had
   computed is given up bit by bit as the crowd grows on;
3. the crowd ends, all of it in one step, and the long request is resumed. The time from there to its next token is what
   is compared, over the turns by its median.

Afterwards the long request is asked once more, alone and with a cache of its own: its text must have been the same
each time. Exit status: 0 if it was, nothing was lost (each request has ended well, each block is accounted for), and
resuming from host memory was faster; else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadtest.replicas import Replica, replicas, sluice
from server.bench.client import BenchError
from server.bench.process import run_until_told
from server.bench.report import align

BLOCK = 16
CROWD_PROMPT = 8
ANSWER = 64
ROOM = 3  # blocks of each in the crowd before the long request is in its way
REMAINDER = 4  # blocks that the crowd never takes
FULL_SHARE = 4  # of the long request's blocks, the part that the tier that is too small has room for
TIMEOUT = 1800.0
SETTLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens: of the long prompt. crowd: sequences that grow beside it. The rest follows."""

    tokens: int
    crowd: int

    @property
    def long_blocks(self) -> int:
        return -(-(self.tokens + ANSWER) // BLOCK)

    @property
    def pool_blocks(self) -> int:
        """Both fit at first; at its full length the crowd leaves REMAINDER blocks, and a few that do not divide."""
        return self.long_blocks + ROOM * self.crowd + REMAINDER

    @property
    def crowd_tokens(self) -> int:
        """That each of the crowd generates."""
        return (self.pool_blocks - REMAINDER) // self.crowd * BLOCK - CROWD_PROMPT

    @property
    def full_tier_blocks(self) -> int:
        return max(1, self.long_blocks // FULL_SHARE)


class Stream:
    """One streamed completion, read by a thread. `arrivals`: when each piece of text came."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.arrivals: list[float] = []
        self.text = ""
        self.failure: str | None = None
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self._reading = asyncio.create_task(asyncio.to_thread(self._read, url, body))

    async def begun(self) -> None:
        """Until the first text has come. Raises BenchError where none does."""
        await self._begun.wait()
        self._check()

    async def ended(self) -> None:
        """Until it is over. Raises BenchError where it has failed."""
        await self._reading
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise BenchError(f"a request failed: {self.failure}")

    def _read(self, url: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        finished = False
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                for line in response:
                    now = time.perf_counter()
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.failure = str(event["error"])
                        elif any(choice["text"] for choice in event["choices"]):
                            self.arrivals.append(now)
                            self._loop.call_soon_threadsafe(self._begun.set)
                            self.text += "".join(choice["text"] for choice in event["choices"])
                    finished = finished or line.startswith(b"data: [DONE]")
        except OSError as error:
            self.failure = str(error)
        if not finished and self.failure is None:
            self.failure = "the stream broke off"
        self._loop.call_soon_threadsafe(self._begun.set)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server has counted since its start, and its gauges.

    blocks, host_blocks: of the pool and of host memory, by state; saved, loaded, forgotten: host blocks.
    copy_seconds: of copies to and from host memory.
    """

    running: float
    waiting: float
    received: float
    finished: float
    preemptions: float
    capacity: float
    blocks: dict[str, float]
    host_blocks: dict[str, float]
    saved: float
    loaded: float
    forgotten: float
    copy_seconds: float

    @classmethod
    def read(cls, text: str) -> Counts:
        """From a page of metrics."""
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

        def total(name: str, **labels: str) -> float:
            wanted = labels.items()
            return sum(one.value for one in samples if one.name == f"sluice_{name}" and wanted <= one.labels.items())

        def states(name: str) -> dict[str, float]:
            return {one.labels["state"]: one.value for one in samples if one.name == f"sluice_{name}"}

        return cls(
            running=total("requests_running"),
            waiting=total("requests_waiting"),
            received=total("requests_received_total"),
            finished=total("requests_total"),
            preemptions=total("preemptions_total"),
            capacity=total("kv_cache_capacity_blocks"),
            blocks=states("kv_cache_blocks"),
            host_blocks=states("kv_cache_host_blocks"),
            saved=total("kv_cache_host_copied_blocks_total", direction="save"),
            loaded=total("kv_cache_host_copied_blocks_total", direction="load"),
            forgotten=total("kv_cache_host_evicted_blocks_total"),
            copy_seconds=total("kv_copy_seconds_sum"),
        )

    def losses(self, host_blocks: int) -> list[str]:
        """What does not add up in an idle server with so many blocks of host memory."""
        found = []
        if self.running or self.waiting or self.blocks["used"]:
            found.append(f"{self.blocks['used']:.0f} blocks are in use, {self.running:.0f} requests run")
        if sum(self.blocks.values()) != self.capacity:
            found.append(f"the blocks of the pool are {sum(self.blocks.values()):.0f}, not {self.capacity:.0f}")
        if sum(self.host_blocks.values()) != host_blocks:
            found.append(f"those of host memory are {sum(self.host_blocks.values()):.0f}, not {host_blocks}")
        if self.received != self.finished:
            found.append(f"{self.received:.0f} requests came, {self.finished:.0f} ended")
        return found


@dataclass(frozen=True, slots=True)
class Turn:
    """resume: seconds from the end of the crowd to the long request's next token. text: all of its answer."""

    resume: float
    text: str


@dataclass(slots=True)
class Side:
    """One server and what came of it. `host_blocks`: those it was given."""

    name: str
    host_blocks: int
    server: Replica
    turns: list[Turn] = field(default_factory=list)
    counts: Counts | None = None

    @property
    def resume(self) -> float:
        """Median seconds."""
        return statistics.median(turn.resume for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Outcome:
    """sides: without host memory first, then with enough, then with too little. expected: the text of each turn."""

    sides: Sequence[Side]
    expected: Sequence[str]

    def equal(self, side: Side) -> int:
        """Turns whose text was as it is without disturbance."""
        return sum(turn.text == text for turn, text in zip(side.turns, self.expected, strict=True))

    def problems(self) -> list[str]:
        without, enough, full = self.sides
        found = []
        for side in self.sides:
            assert side.counts is not None
            if self.equal(side) != len(self.expected):
                found.append(f"{side.name}: the text is another in {len(self.expected) - self.equal(side)} turns")
            found += [f"{side.name}: {loss}" for loss in side.counts.losses(side.host_blocks)]
        if enough.resume >= without.resume:
            found.append("host memory made nothing faster")
        assert full.counts is not None
        if not full.counts.forgotten:
            found.append(f"{full.name}: it was never full")
        return found

    def table(self) -> str:
        head = ["host memory", "resumed in", "of without", "copies", "saved", "loaded", "forgotten", "equal text"]
        rows = [head]
        for side in self.sides:
            assert side.counts is not None
            rows.append(
                [
                    side.name,
                    f"{side.resume * 1000:.0f} ms",
                    f"{side.resume / self.sides[0].resume:.3f}",
                    f"{side.counts.copy_seconds * 1000:.0f} ms",
                    *(f"{count:.0f}" for count in (side.counts.saved, side.counts.loaded, side.counts.forgotten)),
                    f"{self.equal(side)} of {len(self.expected)}",
                ]
            )
        return align(rows)


async def read_counts(server: Replica) -> Counts:
    return Counts.read((await server.client.request("GET", "/metrics")).body.decode())


async def settled(server: Replica) -> Counts:
    """The counts once nothing runs any more, or has not stopped running for long."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        counts = await read_counts(server)
        if not (counts.running or counts.waiting or counts.blocks["used"]) or time.monotonic() > deadline:
            return counts
        await asyncio.sleep(0.1)


def completion(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}


def long_request(shape: Shape, number: int, **more: Any) -> dict[str, Any]:
    """Another one each turn, so that no cache knows it. Small ids are tokens in every vocabulary."""
    prompt = random.Random(number).choices(range(100, 400), k=shape.tokens)
    return completion(prompt, ANSWER, temperature=0, **more)


async def take_turn(server: Replica, shape: Shape, number: int) -> Turn:
    """Raises BenchError where a request fails, or the long one was not preempted and resumed as it should have been."""
    before = await settled(server)
    words = random.Random(-1 - number).choices(range(100, 400), k=CROWD_PROMPT)
    crowd = Stream(server.url, completion(words, shape.crowd_tokens, n=shape.crowd, temperature=1, seed=number))
    await crowd.begun()
    long = Stream(server.url, long_request(shape, number))
    await crowd.ended()
    await long.ended()
    end = crowd.arrivals[-1]
    after = await settled(server)
    resumed = next((moment for moment in long.arrivals if moment > end), None)
    if after.preemptions == before.preemptions or resumed is None or long.arrivals[0] > end:
        raise BenchError("the long request was not preempted by the crowd; try another --tokens or --crowd")
    return Turn(resumed - end, long.text)


async def compare(shape: Shape, turns: int, host_memory: str, flags: Sequence[str]) -> Outcome:
    """Raises BenchError where something cannot be started or fails."""
    pool = [f"--kv-blocks={shape.pool_blocks}", f"--block-size={BLOCK}", f"--max-num-seqs={shape.crowd + 1}"]
    small = sluice([*flags, *pool])
    async with replicas([small]) as (without,):
        block_bytes = await _block_bytes(without, shape)
        little = f"--kv-host-memory={shape.full_tier_blocks * block_bytes}"
        makes = [sluice([*flags, *pool, f"--kv-host-memory={host_memory}"]), sluice([*flags, *pool, little])]
        async with replicas(makes) as (enough, full):
            sides = [Side("none", 0, without)]
            for server, name in ((enough, host_memory), (full, f"{shape.full_tier_blocks} blocks")):
                blocks = sum((await read_counts(server)).host_blocks.values())
                sides.append(Side(name, round(blocks), server))
            for number in range(turns):
                for side in sides[number % 3 :] + sides[: number % 3]:
                    print(f"turn {number + 1}: host memory: {side.name}", file=sys.stderr, flush=True)
                    side.turns.append(await take_turn(side.server, shape, number))
            for side in sides:
                side.counts = await settled(side.server)
            expected = []
            for number in range(turns):
                alone = Stream(without.url, long_request(shape, number, cache_salt="alone"))
                await alone.ended()
                expected.append(alone.text)
    return Outcome(sides, expected)


async def _block_bytes(server: Replica, shape: Shape) -> int:
    """Of a block, by what the server says its pool takes, which has one more for padding."""
    text = (await server.client.request("GET", "/metrics")).body.decode()
    sizes = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sluice_memory_bytes" and sample.labels["kind"] == "kv_cache"
    ]
    return round(sum(sizes)) // (shape.pool_blocks + 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.host_tier", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1536, help="of the long prompt")
    parser.add_argument("--crowd", type=int, default=16, help="sequences that take its blocks")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--host-memory", default="1GiB", help="of the server that has enough")
    parser.add_argument("flags", nargs="*", help="after --, options of the servers")
    options = parser.parse_args(argv)
    shape = Shape(options.tokens, options.crowd)
    try:
        outcome = run_until_told(compare(shape, options.turns, options.host_memory, options.flags))
    except BenchError as error:
        print(f"loadtest.host_tier: {error}", file=sys.stderr)
        return error.status
    print(
        f"A request of {shape.tokens} tokens preempted by {shape.crowd} sequences in a pool of {shape.pool_blocks} "
        f"blocks, {options.turns} turns"
    )
    print(outcome.table())
    problems = outcome.problems()
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
