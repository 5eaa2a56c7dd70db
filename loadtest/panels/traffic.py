"""A load that gives every panel something to show, and what its clients saw of it.

Streamed and not, completions and chat, a prefix in common, answers that end by a stop string and by length, requests
with a budget of the cache, a prefix that comes back from host memory, requests that are invalid, too long or too many,
clients that go away, and two that run out of time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx

from server.bench.client import BenchError, Client
from server.bench.load import model_of
from server.bench.record import Record
from server.config import Objectives
from server.step import EvictionPolicy

TOKEN_BYTES = 30 * 3 * (64 + 64 + 1) * 4
"""Of a token in the embedded model's cache: 30 layers, 3 heads, a key and a value of 64 and a score, 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a load is, and the servers that it is for: with so few blocks that requests in their longest form evict
    cached ones and preempt each other.

    slots, queue: requests that a server runs, and lets wait; blocks, block_tokens: of its cache, and host_blocks: of
        its host memory, more than of the cache so that what has just left that is still there.
    budget: tokens that a request keeps which has a budget; two such requests fit in the cache together.
    long_tokens: of an answer under pressure; endless_tokens: of one that takes longer than anybody waits for it.
    talks: conversations, two at a time; seconds: how long more requests come than a server can take; steady_seconds:
        how long before and after that it has half as many as it can run.
    """

    slots: int
    queue: int
    blocks: int
    block_tokens: int
    host_blocks: int
    budget: int
    long_tokens: int
    endless_tokens: int
    talks: int
    seconds: float
    steady_seconds: float
    objectives: Objectives

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * TOKEN_BYTES

    @property
    def slack(self) -> int:
        """Tokens beyond its budget that a request takes before it drops as many: a quarter, at least four blocks."""
        return max(4, math.ceil(self.budget / 4 / self.block_tokens)) * self.block_tokens

    @property
    def flags(self) -> tuple[str, ...]:
        """Of `sluice serve`."""
        return (
            f"--max-num-seqs={self.slots}",
            f"--max-queued-requests={self.queue}",
            f"--kv-blocks={self.blocks}",
            f"--block-size={self.block_tokens}",
            f"--kv-host-memory={self.host_blocks * self.block_bytes}",
            "--kv-policy=h2o",
            "--max-num-batched-tokens=64",  # a start measures the largest step, and prompts take several
            f"--slo-ttft={self.objectives.ttft_seconds:g}",
            f"--slo-inter-token={self.objectives.inter_token_seconds:g}",
        )


QUICK = Scale(
    slots=4,
    queue=4,
    blocks=16,
    block_tokens=8,
    host_blocks=24,
    budget=16,
    long_tokens=20,
    endless_tokens=100,
    talks=4,
    seconds=1.5,
    steady_seconds=0.0,
    objectives=Objectives(300.0, 60.0),
)
"""Objectives so far away that only what ran out of time misses them: the clients know exactly how many that are."""
LONG = Scale(
    slots=8,
    queue=8,
    blocks=32,
    block_tokens=16,
    host_blocks=48,
    budget=40,
    long_tokens=56,
    endless_tokens=400,
    talks=4,
    seconds=25.0,
    steady_seconds=40.0,
    objectives=Objectives(5.0, 0.5),
)

PREFIX = "You are a careful clerk of a small harbour town. Answer in one short sentence, name the ship, and be kind. "
GONE_AFTER = 3  # chunks that a client reads before it goes away


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it.

    end: "stop", "length", "abort" or "refused"; cause: of an abort or a refusal, in the metrics' words.
    policy: by which it kept the scale's budget, None for one without.
    returned: whether all that was cached of its prompt had left the device before.
    """

    endpoint: str
    streaming: bool
    record: Record
    end: str
    cause: str = ""
    policy: EvictionPolicy | None = None
    returned: bool = False


class Traffic:
    """Sends the load to one server. Those with a higher number get a little more, so that no two have the same counts.

    outcomes: the requests that are over, in the order in which they ended; busy_until: when the last of them were sent,
        in Unix time.
    """

    def __init__(self, url: str, scale: Scale, number: int) -> None:
        self.outcomes: list[Outcome] = []
        self.busy_until = 0.0
        self._scale = scale
        self._client = Client(url, timeout=120.0)
        self._number = number
        self._topics = count()
        self._model = ""

    async def run(self, together: asyncio.Barrier) -> None:
        """All of it; `together` has the servers come under pressure as one.

        Raises BenchError where the server answers otherwise than this load is made for.
        """
        self._model = await model_of(self._client)
        await self._refusals(1)
        await self._calm(self._scale.talks + 2 * self._number)
        for _ in range(1 + self._number):
            await self._budgets()
        await self._crowd()
        await self._steady(self._scale.steady_seconds)
        await self._refusals(2 + self._number)
        await asyncio.gather(*(self._leave() for _ in range(2 + self._number)), self._cut_short())
        await self._out_of_time(0.001)
        await together.wait()
        await self._pressure(self._scale.seconds)
        await self._steady(self._scale.steady_seconds)
        await self._come_back()
        self._check()

    async def _calm(self, talks: int) -> None:
        """Conversations that begin the same, two at a time, and answers that end by a stop string."""
        for talk in range(talks):
            chat = bool(talk % 2)
            await asyncio.gather(
                self._ask(self._prompt(PREFIX), 8, chat=chat),
                self._ask(self._prompt(PREFIX), 1, chat=chat, stream=False),
            )
        await asyncio.gather(*(self._ask(self._prompt(), 24, stop=["a", "e", "i", "o"]) for _ in range(2)))

    async def _budgets(self) -> None:
        """Two requests that outgrow their budgets, one by its answer and one by its prompt; nobody else is there, who
        might have them preempted and then computed, and cut, once more."""
        budget = self._scale.budget
        long_prompt = PREFIX * (self._scale.blocks * self._scale.block_tokens // 40)
        await asyncio.gather(
            self._ask(self._prompt(), self._scale.endless_tokens, ignore_eos=True, kv_budget=budget),
            self._ask(self._prompt(long_prompt), 8, ignore_eos=True, kv_budget=budget, kv_policy="window"),
        )

    async def _crowd(self) -> None:
        """Two requests that need more blocks together than there are, and take none from the prefix cache: the one that
        gives way is computed once more."""
        size = self._scale.blocks * self._scale.block_tokens
        crowd = (self._ask(self._prompt(), size * 5 // 8, ignore_eos=True, cache_prompt=False) for _ in range(2))
        await asyncio.gather(*crowd)

    async def _come_back(self) -> None:
        """A prompt whose beginning was cached, until one that takes every block of the device had it moved to host
        memory."""
        size = self._scale.block_tokens
        await self._ask(self._prompt(PREFIX), 1)
        first = 1000 * (1 + self._number)  # an id like any other
        await self._ask(list(range(first, first + (self._scale.blocks - 1) * size)), size, ignore_eos=True)
        await self._ask(self._prompt(PREFIX), 1)
        last = self.outcomes[-1]
        if not last.record.cached_tokens:
            raise BenchError("a prefix that had left the device did not come back from host memory")
        last.returned = True

    async def _steady(self, seconds: float) -> None:
        """Half as many users as there are slots, all of whom send prompts that begin the same."""
        end = self._client.clock() + seconds
        self.busy_until = time.time() + seconds

        async def user(chat: bool) -> None:
            while self._client.clock() < end:
                await self._ask(self._prompt(PREFIX), self._scale.long_tokens // 2, chat=chat)

        await asyncio.gather(*(user(bool(number % 2)) for number in range(self._scale.slots // 2)))

    async def _refusals(self, each: int) -> None:
        for _ in range(each):
            await self._refused("invalid", temperature=3)
        for _ in range(each + 1):
            await self._refused("too_long", prompt="ship " * 2 * self._scale.blocks * self._scale.block_tokens)

    async def _pressure(self, seconds: float) -> None:
        """More users than slots, one of whom has no patience, and then more than the queue holds."""
        end = self._client.clock() + seconds

        async def user() -> None:
            while self._client.clock() < end:
                await self._ask(self._prompt(), self._scale.long_tokens, ignore_eos=True)

        async def burst() -> None:
            await asyncio.sleep(seconds / 4)
            await self._impatient()
            await asyncio.sleep(seconds / 4)
            await asyncio.gather(*(self._ask(self._prompt(), 8, ignore_eos=True) for _ in range(self._scale.queue)))

        await asyncio.gather(burst(), *(user() for _ in range(self._scale.slots + self._scale.queue - 1)))

    def _check(self) -> None:
        seen = {outcome.cause or outcome.end for outcome in self.outcomes}
        wanted = {"stop", "length", "disconnect", "queue_timeout", "deadline", "deadline_empty"}
        wanted |= {"invalid", "too_long", "queue_full"}
        if seen != wanted:
            raise BenchError(f"the load caused {sorted(seen)} instead of {sorted(wanted)}")

    def _prompt(self, prefix: str = "") -> str:
        return f"{prefix}Ship {self._number}-{next(self._topics)} came in from the sea this morning and"

    def _body(self, prompt: str | list[int], max_tokens: int, chat: bool, **fields: Any) -> tuple[str, bytes]:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        asked |= {"model": self._model, "max_tokens": max_tokens, "temperature": 0, **fields}
        if fields.get("stream"):
            asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return "/v1/chat/completions" if chat else "/v1/completions", json.dumps(asked).encode()

    async def _ask(
        self, prompt: str | list[int], tokens: int, *, chat: bool = False, stream: bool = True, **fields: Any
    ) -> None:
        """One request that is answered, or refused because the queue is full."""
        path, body = self._body(prompt, tokens, chat, stream=stream, **fields)
        record = await (self._client.stream(path, body) if stream else self._whole(path, body))
        endpoint = "chat" if chat else "completions"
        if record.status == 429:
            self.outcomes.append(Outcome(endpoint, stream, record, "refused", "queue_full"))
        elif record.failure is None and record.finish_reason in ("stop", "length"):
            policy = fields.get("kv_policy", "h2o") if fields.get("kv_budget") == self._scale.budget else None
            self.outcomes.append(Outcome(endpoint, stream, record, record.finish_reason, policy=policy))
        else:
            raise BenchError(f"{path}: {record.failure or record.finish_reason}")

    async def _whole(self, path: str, body: bytes) -> Record:
        """Not streamed. Of one token, so that the client knows when it came: with the answer."""
        record = Record(intended=self._client.clock(), sent=self._client.clock())
        response = await self._client.request("POST", path, json.loads(body))
        record.ended, record.status = self._client.clock(), response.status
        if response.status != 200:
            record.fail(response.error)
            return record
        answer = response.json()
        record.finish_reason = answer["choices"][0]["finish_reason"]
        record.arrivals = [record.ended]
        _take_usage(record, answer["usage"])
        return record

    async def _refused(self, reason: str, prompt: str = "Ahoy", **fields: Any) -> None:
        path, body = self._body(prompt, 1, False, **fields)
        record = await self._whole(path, body)
        if record.status != 400:
            raise BenchError(f"a request that is {reason} was answered {record.status}")
        self.outcomes.append(Outcome("completions", False, record, "refused", reason))

    async def _leave(self) -> None:
        """A client that goes away in the middle of its answer."""
        path, body = self._body(self._prompt(), self._scale.endless_tokens, False, stream=True, ignore_eos=True)
        clock = self._client.clock
        record = Record(intended=clock(), sent=clock())
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", self._client.url + path, json=json.loads(body)) as response,
        ):
            record.status = response.status_code
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    record.arrivals.append(clock())
                    _take_usage(record, json.loads(line.removeprefix("data: "))["usage"])
                if len(record.arrivals) == GONE_AFTER:
                    break
        record.ended = clock()
        if len(record.arrivals) < GONE_AFTER:
            raise BenchError(f"a long answer ended (status {record.status}) before its client could go away")
        self.outcomes.append(Outcome("completions", True, record, "abort", "disconnect"))

    async def _impatient(self) -> None:
        """A request that may not wait until it could start."""
        path, body = self._body(self._prompt(), 1, False, queue_timeout=0.05)
        record = await self._whole(path, body)
        if record.status != 503:
            raise BenchError(f"a request that had to wait too long was answered {record.status}")
        self.outcomes.append(Outcome("completions", False, record, "abort", "queue_timeout"))

    async def _cut_short(self) -> None:
        """A request that ends with a part of its answer; one that a busy machine gave nothing is tried again."""
        seconds = 1.0
        while await self._out_of_time(seconds) == "deadline_empty":
            seconds *= 2

    async def _out_of_time(self, seconds: float) -> str:
        """A request that may not take as long as it would: it ends with what it has, or with an error if that is
        nothing. Returns which."""
        path, body = self._body(
            self._prompt(), self._scale.endless_tokens, False, stream=True, ignore_eos=True, request_timeout=seconds
        )
        record = await self._client.stream(path, body)
        if record.output_tokens >= self._scale.endless_tokens or "request_timeout" not in (
            record.failure or "request_timeout"
        ):
            raise BenchError(f"a request of {seconds:g} seconds ended with {record.failure or record.finish_reason}")
        cause = "deadline" if record.failure is None else "deadline_empty"
        self.outcomes.append(Outcome("completions", True, record, "abort", cause))
        return cause


def _take_usage(record: Record, usage: dict[str, Any]) -> None:
    record.prompt_tokens, record.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
