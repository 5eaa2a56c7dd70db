"""The server beside a bare loop of the same model's forward passes, in turns, on the same work."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from server.bench.client import BenchError, Client
from server.bench.load import Limits, closed_loop
from server.bench.process import end
from server.bench.report import Level, align, summarize
from server.bench.workload import Workload

BARE = (sys.executable, "-m", "server.bench.bare")
SETTLE_SECONDS = 0.5  # until the compute threads of the side that has just run are asleep
MAX_LINE = 2**26


@dataclass(frozen=True, slots=True)
class BareResult:
    """One turn of the bare loop; seconds."""

    seconds: float
    prefill_seconds: float
    output_tokens: int

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


class BareProcess:
    """The bare loop, in a process that does nothing between requests. Make one with `bare_process`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Any) -> None:
        self._process = process
        self._log = log

    async def ask(self, op: str, **arguments: Any) -> Any:
        """Send one request to the process and wait for its answer. Raises BenchError if it has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        answer = b""
        try:
            await self._process.stdin.drain()
            answer = await self._process.stdout.readline()
        except ConnectionError:
            pass  # it has died, which the empty answer says
        if not answer:
            self._log.seek(0)
            raise BenchError(f"the bare loop failed:\n{self._log.read().decode('utf-8', 'replace')[-3000:].strip()}")
        return json.loads(answer)

    async def prompts(self, texts: Sequence[str], tokens: int) -> list[list[int]]:
        """Token ids of the texts, each exactly `tokens` long."""
        answer = await self.ask("prompts", texts=list(texts), tokens=tokens)
        return list(answer["prompts"])

    async def run(self, prompts: Sequence[list[int]], batch: int, output_tokens: int, cache: str) -> BareResult:
        """Continue the prompts in static batches of `batch`."""
        answer = await self.ask("run", prompts=list(prompts), batch=batch, output_tokens=output_tokens, cache=cache)
        return BareResult(answer["seconds"], answer["prefill_seconds"], len(prompts) * output_tokens)


@asynccontextmanager
async def bare_process(flags: Sequence[str], command: Sequence[str] = BARE) -> AsyncIterator[BareProcess]:
    """Start the bare loop with the flags of the server, and end it afterwards."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *flags,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            limit=MAX_LINE,
        )
        try:
            yield BareProcess(process, log)
        finally:
            await end(process)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Turns of both sides over the same prompts; `cache` is the Hugging Face cache that did better before them.

    trials: output tokens a second of a short run with each kind of cache.
    about: threads, device, dtype and attention implementation of the bare loop.
    """

    batch: int
    input_tokens: int
    output_tokens: int
    requests: int
    cache: str
    trials: dict[str, float]
    about: dict[str, Any]
    served: tuple[Level, ...]
    bare: tuple[BareResult, ...]

    @property
    def ratio(self) -> float:
        """Median of the server over the median of the bare loop, in output tokens a second."""
        served = statistics.median(level.output_tokens_per_s for level in self.served)
        return served / statistics.median(turn.output_tokens_per_s for turn in self.bare)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each turn."""
        pairs = zip(self.served, self.bare, strict=True)
        return [level.output_tokens_per_s / turn.output_tokens_per_s for level, turn in pairs]

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "ratios": self.ratios}

    def table(self) -> str:
        served = [level.output_tokens_per_s for level in self.served]
        bare = [turn.output_tokens_per_s for turn in self.bare]
        prefill = statistics.median(turn.prefill_seconds / turn.seconds for turn in self.bare)
        rows = [
            ["tok/s out", "median", "lowest", "highest"],
            ["server", *_spread(served)],
            [f"bare loop, {self.cache} cache", *_spread(bare)],
        ]
        about = self.about
        return "\n".join(
            [
                f"{self.requests} requests, {self.batch} at a time, {self.input_tokens} tokens in and "
                f"{self.output_tokens} out, {len(served)} turns each",
                align(rows),
                f"ratio {self.ratio:.3f} (turns {min(self.ratios):.3f} to {max(self.ratios):.3f})",
                f"The bare loop runs the unmodified model with {about['attention']} attention in {about['dtype']} on "
                f"{about['device']}, {about['threads']} threads, and spends {prefill:.0%} of its time on prompts; "
                + ", ".join(f"{kind} cache {rate:.1f} tok/s" for kind, rate in self.trials.items())
                + " in a trial.",
            ]
        )


def _spread(values: Sequence[float]) -> list[str]:
    return [f"{value:.1f}" for value in (statistics.median(values), min(values), max(values))]


async def compare_with_bare(
    client: Client,
    workload: Workload,
    bare: BareProcess,
    *,
    batch: int,
    requests: int,
    input_tokens: int,
    turns: int,
    show: Callable[[str], None],
) -> Comparison:
    """Let server and bare loop do the same work in turns: `requests` prompts of equal length, `batch` at a time.

    Every turn has new prompts, cut from the workload's, so that no prefix cache can help. The prompts are sent as token
    ids. Raises BenchError if a request fails: a ratio of partial work would mean nothing.
    """
    about = await bare.ask("about")
    texts = [prompt for prompt in workload.prompts if isinstance(prompt, str)]
    serial = iter(range(requests * turns + batch))

    async def fresh(count: int) -> list[list[int]]:
        numbers = [next(serial) for _ in range(count)]
        fresh_texts = [_long(texts, number, workload.run, input_tokens) for number in numbers]
        return await bare.prompts(fresh_texts, input_tokens)

    trial = await fresh(batch)
    trials = {}
    for cache in ("dynamic", "static"):
        show(f"bare loop, trial with the {cache} cache")
        await bare.run(trial, batch, min(4, workload.output_tokens), cache)  # first calls allocate
        trials[cache] = (await bare.run(trial, batch, workload.output_tokens, cache)).output_tokens_per_s
    cache = max(trials, key=trials.__getitem__)
    served, results = [], []
    for turn in range(1, turns + 1):
        prompts = await fresh(requests)
        await asyncio.sleep(SETTLE_SECONDS)
        show(f"turn {turn} of {turns}: server")
        ours = Workload(
            prompts, workload.model, workload.output_tokens, workload.run, seed=workload.seed, extras=workload.extras
        )
        level = summarize(f"{batch} clients", await closed_loop(client, ours, batch, Limits(requests)))
        if level.failures or level.output_tokens != requests * workload.output_tokens:
            reason = next(iter(level.failure_kinds), f"only {level.output_tokens} tokens came")
            raise BenchError(f"{level.failures} of {requests} requests failed in turn {turn}: {reason}")
        served.append(level)
        await asyncio.sleep(SETTLE_SECONDS)
        show(f"turn {turn} of {turns}: bare loop")
        results.append(await bare.run(prompts, batch, workload.output_tokens, cache))
    return Comparison(
        batch,
        input_tokens,
        workload.output_tokens,
        requests,
        cache,
        trials,
        about,
        tuple(served),
        tuple(results),
    )


def _long(texts: Sequence[str], number: int, run: str, tokens: int) -> str:
    """A text of more than `tokens` tokens, unlike any of another number from its first words on."""
    parts, length = [f"[{run}.{number}]"], 0
    at = number
    while length < 8 * tokens:
        parts.append(texts[at % len(texts)])
        length += len(parts[-1])
        at += 1
    return " ".join(parts)
