"""How fast does /metrics answer under full load? What a router that scrapes every 50 milliseconds would see.

    python -m loadtest.scrape                      # its own server, on the embedded model
    python -m loadtest.scrape -- --metrics-compat vllm
    python -m loadtest.scrape --url http://host:8000 --concurrency 400 --seconds 60

asks for /metrics twenty times a second from a process of its own: first in peace, then while so many clients as
--concurrency each send their next request as soon as their last one has ended. It prints the percentiles of both, in
milliseconds, the size of the text, how full the server was in the middle of it, and which of the gauges that routers
read are not exactly one series. Exit status: 0 if all are, the 99th percentile stays under --limit and no request
failed, else 1. The last requests are given up at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadtest.latency import Latencies, measure
from server.bench.client import BenchError, Client
from server.bench.load import Limits, closed_loop, model_of, probe
from server.bench.process import own_server, run_until_told
from server.bench.workload import Workload, load_prompts

INTERVAL_SECONDS = 0.05
PEACE_SECONDS = 3.0
OUTPUT_TOKENS = 128
GAUGES = (
    "sluice_requests_running",
    "sluice_requests_running_limit",
    "sluice_requests_waiting",
    "sluice_kv_cache_usage_ratio",
)
VLLM_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hit_rate",
)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One text of /metrics: its bytes, and the value of each gauge that routers read and that is one series."""

    nbytes: int
    gauges: dict[str, float]
    not_one: dict[str, int]

    @classmethod
    def read(cls, body: bytes) -> Scrape:
        """Raises BenchError where the text is not Prometheus' format."""
        try:
            samples = [s for family in text_string_to_metric_families(body.decode()) for s in family.samples]
        except ValueError:
            raise BenchError(f"/metrics is not in Prometheus' text format: {body[:80]!r}") from None
        series = Counter(sample.name for sample in samples)
        is_compatible = any(name.startswith("vllm:") for name in series)
        wanted = (*GAUGES, *VLLM_GAUGES) if is_compatible else GAUGES
        values = {sample.name: sample.value for sample in samples}
        return cls(
            len(body),
            {name: values[name] for name in wanted if series[name] == 1},
            {name: series[name] for name in wanted if series[name] != 1},
        )


@dataclass(frozen=True, slots=True)
class Result:
    """done, failed: requests of the load that ended, and those of them that failed."""

    in_peace: Latencies
    under_load: Latencies
    scrape: Scrape
    done: int
    failed: int

    def passes(self, limit: float) -> bool:
        """limit: seconds."""
        return self.under_load.at(0.99) < limit and not self.scrape.not_one and not self.failed

    def __str__(self) -> str:
        gauges = self.scrape.gauges
        running, room = gauges.get("sluice_requests_running", 0), gauges.get("sluice_requests_running_limit", 0)
        waiting = gauges.get("sluice_requests_waiting", 0)
        not_one = ", ".join(f"{name} is {count}" for name, count in self.scrape.not_one.items())
        return "\n".join(
            (
                f"/metrics in peace, ms:     {self.in_peace}",
                f"/metrics under load, ms:   {self.under_load}",
                f"its size:                  {self.scrape.nbytes:,} bytes",
                f"load:                      {running:.0f} of {room:.0f} running, {waiting:.0f} waiting; "
                f"{self.done} requests done, {self.failed} failed",
                f"gauges that routers read:  {not_one or f'{len(gauges)}, one series each'}",
            )
        )


async def run(url: str, concurrency: int, seconds: float, in_peace_for: float = PEACE_SECONDS) -> Result:
    """Raises BenchError where the server does not serve."""
    client = Client(url)
    workload = Workload(load_prompts(), await model_of(client), OUTPUT_TOKENS, run=f"scrape-{time.time_ns():x}")
    await probe(client, workload)
    counts = (0, 0)

    def count(done: int, failed: int) -> None:
        nonlocal counts
        counts = done, failed

    def watch(for_seconds: float) -> Latencies:
        return measure(client.host, client.port, f"{client.base}/metrics", INTERVAL_SECONDS, for_seconds)

    in_peace = await asyncio.to_thread(watch, in_peace_for)
    load = asyncio.create_task(closed_loop(client, workload, concurrency, Limits(seconds=3600.0), count))
    try:
        watching = asyncio.create_task(asyncio.to_thread(watch, seconds))
        await asyncio.sleep(seconds / 2)
        scrape = Scrape.read((await client.request("GET", "/metrics")).body)
        return Result(in_peace, await watching, scrape, *counts)
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load


async def _main(options: argparse.Namespace) -> int:
    if options.url:
        result = await run(options.url, options.concurrency, options.seconds)
    else:
        async with own_server(options.flags, lambda phase: None) as url:
            result = await run(url, options.concurrency, options.seconds)
    print(result)
    return 0 if result.passes(options.limit / 1000) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.scrape", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", help="a server that runs already; else one is started")
    parser.add_argument("--concurrency", type=int, default=48, help="clients; more than the server runs fill its queue")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to ask under load")
    parser.add_argument("--limit", type=float, default=100.0, help="milliseconds that the 99th percentile may take")
    parser.add_argument("flags", nargs="*", help="after --, options of the server that is started")
    options = parser.parse_args(argv)
    try:
        return run_until_told(_main(options))
    except BenchError as error:
        print(f"loadtest.scrape: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
