"""How many long requests run at once in a pool that holds N of them whole, when each keeps only a part of its cache?

    python -m loadtest.capacity                                    # the embedded model
    python -m loadtest.capacity --fits 8 --tokens 2048 --budget 256 -- Qwen/Qwen3-0.6B

starts a server whose pool holds N requests of --tokens tokens, and offers it four times as many at one moment, each
with a prompt and an answer that make up so many tokens: first as they are, then each with --budget as its `kv_budget`
(H2O). What ran at once is read from the server's own /metrics, all the time. Exit status: 0 if no request failed and
more than 2N ran at once with the budget, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from server.bench.client import BenchError, Client
from server.bench.load import model_of
from server.bench.process import own_server, run_until_told
from server.bench.report import align
from server.kvpool.sizing import budget_slack

BLOCK = 16
OFFERED = 4  # times as many as the pool holds
POLL_SECONDS = 0.02
TOKEN_IDS = range(10, 250)  # ordinary tokens of any vocabulary


@dataclass(frozen=True, slots=True)
class Task:
    """fits: requests that the pool holds whole. tokens: of each, the last `answer` of them generated.

    budget: tokens of each that stay in its cache, in the second turn.
    """

    fits: int
    tokens: int
    answer: int
    budget: int
    seed: int = 0

    @property
    def offered(self) -> int:
        return OFFERED * self.fits

    @property
    def blocks(self) -> int:
        """Of the pool."""
        return self.fits * -(-self.tokens // BLOCK)

    @property
    def most_with_budget(self) -> int:
        """Requests whose blocks, at their most, the pool has, though more can run while they hold fewer."""
        held = self.budget + budget_slack(self.budget, BLOCK)
        return self.blocks // -(-min(held, self.tokens) // BLOCK)

    def prompts(self) -> list[list[int]]:
        """Different ones, so that the prefix cache does not help."""
        rng = random.Random(self.seed)
        return [rng.choices(TOKEN_IDS, k=self.tokens - self.answer) for _ in range(self.offered)]


@dataclass(frozen=True, slots=True)
class Sample:
    """One page of metrics. usage: share of the pool that running requests hold. evicted: blocks by cause, so far."""

    running: float
    waiting: float
    usage: float
    capacity: float
    preemptions: float
    evicted: Counter[str]

    @classmethod
    def read(cls, text: str) -> Self:
        """Raises BenchError where something is missing."""
        values: dict[str, float] = {}
        evicted: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = sample.value
                if sample.name == "sluice_kv_cache_evicted_blocks_total":
                    evicted[sample.labels["cause"]] = int(sample.value)
        try:
            return cls(
                values["sluice_requests_running"],
                values["sluice_requests_waiting"],
                values["sluice_kv_cache_usage_ratio"],
                values["sluice_kv_cache_capacity_blocks"],
                values["sluice_preemptions_total"],
                evicted,
            )
        except KeyError as error:
            raise BenchError(f"/metrics has no {error.args[0]}") from None


@dataclass(frozen=True, slots=True)
class Turn:
    """What the server said while all requests were offered. `evicted`: blocks that budgets gave back.

    seconds: until the last answer. evicted_tokens: by the usage of the answers.
    """

    name: str
    running: int
    waiting: int
    usage: float
    preemptions: int
    evicted: int
    evicted_tokens: int
    seconds: float


class Watch:
    """Polls /metrics while it is entered. `samples`: all that it saw, the state before the load first."""

    def __init__(self, client: Client) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.poll()
        self._task = asyncio.create_task(self._keep_polling())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # whoever needs more polls again, and is told

    async def poll(self) -> None:
        response = await self._client.request("GET", "/metrics")
        if response.status != 200:
            raise BenchError(f"/metrics answers {response.error}")
        self.samples.append(Sample.read(response.body.decode()))

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.poll()


async def offer(client: Client, model: str, task: Task, budget: int | None) -> Turn:
    """All requests at one moment, up to the last answer. Raises BenchError where one fails or is not of its length."""
    body: dict[str, Any] = {"model": model, "max_tokens": task.answer, "temperature": 0, "ignore_eos": True}
    if budget is not None:
        body["kv_budget"] = budget

    async def ask(prompt: list[int]) -> int:
        response = await client.request("POST", "/v1/completions", body | {"prompt": prompt})
        if response.status != 200:
            raise BenchError(f"a request failed: {response.error}")
        usage = response.json()["usage"]
        if usage["prompt_tokens"] + usage["completion_tokens"] != task.tokens:
            raise BenchError(f"a request was not of {task.tokens} tokens: {usage}")
        return int(usage.get("kv_evicted_tokens", 0))

    begun = time.perf_counter()
    async with Watch(client) as watch:
        dropped = await asyncio.gather(*map(ask, task.prompts()))
        seconds = time.perf_counter() - begun
        await watch.poll()
    before, after = watch.samples[0], watch.samples[-1]
    if before.capacity != task.blocks:
        raise BenchError(
            f"the pool has {before.capacity:.0f} blocks and not {task.blocks}: leave its size to this test"
        )
    return Turn(
        "whole cache" if budget is None else f"H2O of {budget}",
        round(max(sample.running for sample in watch.samples)),
        round(max(sample.waiting for sample in watch.samples)),
        max(sample.usage for sample in watch.samples),
        round(after.preemptions - before.preemptions),
        after.evicted["h2o"] - before.evicted["h2o"],
        sum(dropped),
        seconds,
    )


async def run(task: Task, flags: Sequence[str]) -> list[Turn]:
    """flags: of the server, the model among them. Raises BenchError where it does not serve."""
    own = ["--kv-policy=h2o", f"--kv-blocks={task.blocks}", f"--block-size={BLOCK}", f"--max-num-seqs={task.offered}"]
    async with own_server([*flags, *own], lambda phase: None) as url:
        client = Client(url, timeout=3600.0)
        model = await model_of(client)
        return [await offer(client, model, task, budget) for budget in (None, task.budget)]


def table(turns: Sequence[Turn]) -> str:
    rows = [["", "most running", "most waiting", "pool used", "preempted", "blocks given back", "tokens dropped", "s"]]
    for turn in turns:
        counts = [f"{count:,}" for count in (turn.preemptions, turn.evicted, turn.evicted_tokens)]
        peaks = [str(turn.running), str(turn.waiting), f"{turn.usage:.0%}"]
        rows.append([turn.name, *peaks, *counts, f"{turn.seconds:.1f}"])
    return align(rows)


def report(task: Task, turns: Sequence[Turn]) -> bool:
    """Print what was found; whether more than twice as many as fit ran at once with the budget."""
    print(
        f"{task.offered} requests of {task.tokens} tokens, {task.answer} of them generated, before a pool of "
        f"{task.blocks} blocks, which hold {task.fits} of them whole\n"
    )
    print(table(turns))
    most = turns[-1].running
    shown = most > 2 * task.fits
    print(f"\nwith the budget {most} ran at once, {'more' if shown else 'NOT more'} than twice {task.fits}")
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.capacity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fits", type=int, default=4, metavar="N", help="requests that the pool holds whole")
    parser.add_argument("--tokens", type=int, default=768, help="of a request, its answer included")
    parser.add_argument("--answer", type=int, default=64, help="tokens that are generated")
    parser.add_argument("--budget", type=int, default=192, help="tokens that stay in a request's cache")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("flags", nargs="*", help="after --, options of the server that is started, and its model")
    options = parser.parse_args(argv)
    task = Task(options.fits, options.tokens, options.answer, options.budget, options.seed)
    if not 0 < task.answer < task.tokens or task.fits < 1:
        parser.error("--fits must be at least 1, and --answer at least 1 and less than --tokens")
    if task.most_with_budget <= 2 * task.fits:
        parser.error(
            f"with --budget {task.budget} the pool holds {task.most_with_budget} requests, not more than twice "
            f"--fits: lower it, or raise --tokens"
        )
    try:
        turns = run_until_told(run(task, options.flags))
    except (BenchError, OSError) as error:
        print(f"loadtest.capacity: {error}", file=sys.stderr)
        return error.status if isinstance(error, BenchError) else 1
    return 0 if report(task, turns) else 1


if __name__ == "__main__":
    sys.exit(main())
