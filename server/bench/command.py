"""What `sluice bench` does, from its options to the result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from server import __version__
from server.bench.baseline import Comparison, bare_process, compare_with_bare
from server.bench.client import BenchError, Client
from server.bench.constrained import SCHEMA, ConstrainedComparison
from server.bench.fragmentation import FragmentationWatch
from server.bench.lengths import mixed
from server.bench.load import Limits, Run, closed_loop, count_tokens, model_of, open_loop, probe
from server.bench.options import parse
from server.bench.prefix import PrefixComparison
from server.bench.process import own_server, run_until_told
from server.bench.progress import ProgressLine
from server.bench.report import Level, summarize, table
from server.bench.workload import Workload, fit_prefix, load_prompts, poisson_arrivals


class Bench:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace, flags: Sequence[str]) -> None:
        self.options = options
        self.flags = list(flags)
        self.prompts = load_prompts(options.prompts)
        self.run_tag = secrets.token_hex(2)
        self.progress = ProgressLine()
        self.refused: list[str] = []

    async def run(self) -> tuple[dict[str, Any], str, int]:
        """Measure: the numbers as JSON, as text, and the exit status."""
        if self.options.baseline:
            comparison = await self.baseline(self.options.baseline)
            return self.document("baseline", comparison.json()), comparison.table(), 0
        if self.options.compare_prefix_cache:
            prefixes = await self.compare_prefix_cache()
            return self.document("prefix_cache", prefixes.json()), prefixes.table(), 0
        if self.options.compare_constrained:
            constrained = await self.compare_constrained()
            return self.document("constrained", constrained.json()), constrained.table(), 0
        levels = await self.levels()
        status = 1 if any(level.failures for level in levels) else 0
        text = table(levels)
        if self.refused:
            text += f"\nThe server refuses {', '.join(self.refused)}, so this was measured without."
        return self.document("levels", [level.json() for level in levels]), text, status

    async def levels(self) -> list[Level]:
        async with self.target() as client:
            workload = await self.workload(client)
            return await self.apply(client, workload)

    async def compare_prefix_cache(self) -> PrefixComparison:
        sides: dict[bool, list[list[Level]]] = {True: [], False: []}
        prefix = ""
        for turn in range(self.options.turns):
            for caching in (True, False) if turn % 2 == 0 else (False, True):
                self.progress.show(f"turn {turn + 1}: prefix cache {'on' if caching else 'off'}", milestone=True)
                flag = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
                async with self.target([flag]) as client:
                    workload = await self.workload(client, prefix)
                    prefix = workload.prefix
                    levels = await self.apply(client, workload)
                _check(levels)
                sides[caching].append(levels)
        on, off = (tuple(zip(*sides[caching], strict=True)) for caching in (True, False))
        return PrefixComparison(self.options.shared_prefix, on, off)

    async def compare_constrained(self) -> ConstrainedComparison:
        sides: dict[bool, list[list[Level]]] = {True: [], False: []}
        async with self.target() as client:
            workload = await self.workload(client)
            for turn in range(self.options.turns):
                for constrained in (True, False) if turn % 2 == 0 else (False, True):
                    what = "half of the requests constrained" if constrained else "no request constrained"
                    self.progress.show(f"turn {turn + 1}: {what}", milestone=True)
                    workload.schema = SCHEMA if constrained else None
                    levels = await self.apply(client, workload)
                    _check(levels)
                    sides[constrained].append(levels)
        half, free = (tuple(zip(*sides[constrained], strict=True)) for constrained in (True, False))
        return ConstrainedComparison(half, free)

    async def baseline(self, batch: int) -> Comparison:
        wanted = self.options.num_requests or 2 * batch
        async with bare_process(self.flags) as bare:
            self.progress.show("loading the bare loop", milestone=True)
            await bare.ask("about")  # answered once it is loaded; it is idle from here on
            async with self.target() as client:
                workload = await self.workload(client)
                return await compare_with_bare(
                    client,
                    workload,
                    bare,
                    batch=batch,
                    requests=-(-wanted // batch) * batch,
                    input_tokens=self.options.input_tokens,
                    turns=self.options.turns,
                    show=lambda text: self.progress.show(text, milestone=True),
                )

    @asynccontextmanager
    async def target(self, flags: Sequence[str] = ()) -> AsyncIterator[Client]:
        """The server to measure: the one at --url, or our own with further flags."""
        options = self.options
        if options.url:
            yield Client(options.url, options.api_key, options.timeout)
            return
        async with own_server([*self.flags, *flags], lambda text: self.progress.show(text, milestone=True)) as url:
            yield Client(url, options.api_key, options.timeout)

    async def workload(self, client: Client, prefix: str = "") -> Workload:
        """The work for a server, fitted to what it accepts, after the warm-up; `prefix` spares finding one again."""
        options = self.options
        name = options.model if options.url and options.model else await model_of(client)
        workload = Workload(
            self.prompts,
            name,
            options.output_tokens,
            self.run_tag,
            chat=options.chat,
            temperature=options.temperature,
            seed=options.seed,
            verbatim=options.verbatim,
        )
        self.refused = await probe(client, workload)
        text = "\n\n".join(self.prompts)

        async def count(prompt: str) -> int:
            return await count_tokens(client, workload, prompt)

        if options.lengths:
            self.progress.show("measuring out the prompts")
            workload.mix = await mixed(text, workload.tag(100), count, options.seed)
        if options.shared_prefix:
            self.progress.show("measuring out the shared prefix")
            workload.prefix = prefix or await fit_prefix(text, options.shared_prefix, count, self.run_tag)
        if options.warmup:
            self.progress.show("warming up")
            warm = await closed_loop(client, workload, 1, Limits(options.warmup))
            if failure := next((record.failure for record in warm.records if record.failure), None):
                raise BenchError(f"a request of the warm-up failed: {failure}")
        return workload

    async def apply(self, client: Client, workload: Workload) -> list[Level]:
        """Apply each load of the command line in turn."""
        if self.options.rate:
            return [await self.open_level(client, workload, rate) for rate in self.options.rate]
        return [await self.closed_level(client, workload, n) for n in self.options.concurrency or (1, 8, 32)]

    def limits(self, default: int) -> Limits:
        requests, seconds = self.options.num_requests, self.options.duration
        return Limits(requests if requests or seconds else default, seconds)

    async def closed_level(self, client: Client, workload: Workload, concurrency: int) -> Level:
        name = f"{concurrency} client" + "s" * (concurrency > 1)
        limits = self.limits(max(8, 3 * concurrency))
        async with FragmentationWatch(client) as watch:
            run = await closed_loop(client, workload, concurrency, limits, self.counting(name, limits))
        return self.summary(name, run, watch)

    async def open_level(self, client: Client, workload: Workload, rate: float) -> Level:
        name = f"{rate:g} requests/s"
        limits = self.limits(64)
        arrivals = poisson_arrivals(rate, self.options.seed)
        async with FragmentationWatch(client) as watch:
            run = await open_loop(client, workload, arrivals, limits, self.counting(name, limits))
        return self.summary(name, run, watch)

    def counting(self, name: str, limits: Limits) -> Any:
        of = f" of {limits.requests}" if limits.requests else ""
        self.progress.show(f"{name} ...", milestone=True)
        return lambda done, failed: self.progress.show(f"{name}: {done}{of} requests, {failed} failed")

    def summary(self, name: str, run: Run, watch: FragmentationWatch) -> Level:
        self.progress.clear()
        return summarize(name, run, watch.samples)

    def document(self, kind: str, result: Any) -> dict[str, Any]:
        """The result with what one needs to know to repeat it: the options that played a part, but not the API key."""
        left_out = {"api_key", "json"}
        if kind != "baseline":
            left_out.add("input_tokens")
        if self.options.lengths:
            left_out.add("output_tokens")
        options = {name: value for name, value in vars(self.options).items() if name not in left_out}
        return {
            "sluice": __version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
            "options": options,
            "server_flags": self.flags,
            "refused": self.refused,
            kind: result,
        }


def _check(levels: Sequence[Level]) -> None:
    """Raises BenchError where a request failed: the rest is no measurement."""
    if failed := next((level for level in levels if level.failures), None):
        raise BenchError(f"{failed.failures} requests failed: {next(iter(failed.failure_kinds))}")


def main(argv: Sequence[str]) -> int:
    """Run `sluice bench`: 0 when every request succeeded, 1 when some failed or nothing could be measured."""
    options, flags = parse(argv)
    try:
        document, text, status = run_until_told(_run(Bench(options, flags)))
    except BenchError as error:
        print(f"sluice bench: {error}", file=sys.stderr)
        return error.status
    print(json.dumps(document, indent=2, default=str) if options.json else text)
    return status


async def _run(bench: Bench) -> tuple[dict[str, Any], str, int]:
    try:
        return await bench.run()
    finally:
        bench.progress.clear()
