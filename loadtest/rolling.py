"""Are requests lost while the servers behind a load balancer are replaced one by one? None should be.

    python -m loadtest.rolling                              # two servers on the embedded model
    python -m loadtest.rolling --load locust -- --model Qwen/Qwen3-0.6B

starts two servers and HAProxy (a program on the PATH, with deploy/haproxy.cfg) in front of them, puts a load on it, and
restarts one server after the other meanwhile: SIGTERM, exit, start, ready. Exit status: 0 if no request failed and each
server ended with 0, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.replicas import MakeCommand, Replica, haproxy, replicas, sluice
from server.bench.client import BenchError, Client
from server.bench.load import Limits, closed_loop, model_of, probe
from server.bench.process import end, run_until_told
from server.bench.report import align, summarize
from server.bench.workload import Workload, load_prompts

LOCUSTFILE = Path(__file__).parent / "locustfile.py"


@dataclass
class Tally:
    """What the clients saw. `gap`, `wait`: the longest seconds within a stream and before its first token."""

    requests: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    gap: float = 0.0
    wait: float = 0.0

    @classmethod
    def of(cls, level: dict[str, Any]) -> Tally:
        """From the JSON of a `server.bench.report.Level`."""
        gap, wait = ((level[name] or {}).get("max", 0.0) for name in ("chunk_gap", "ttft"))
        return cls(level["requests"], level["failure_kinds"], level["output_tokens"], gap, wait)


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds that a server took to leave and to be ready again, and the status it left with.

    retried: requests that the proxy sent once more meanwhile, to another server or the same.
    """

    server: str
    exit_status: int
    leaving: float
    returning: float
    retried: int


@dataclass(frozen=True, slots=True)
class Outcome:
    tally: Tally
    restarts: tuple[Restart, ...]

    @property
    def good(self) -> bool:
        ended_well = all(restart.exit_status == 0 for restart in self.restarts)
        return ended_well and self.tally.requests > 0 and not self.tally.failures


@dataclass
class Endless(Workload):
    """Requests until it is stopped."""

    stopped: bool = False

    def bodies(self) -> Iterator[bytes]:
        return itertools.takewhile(lambda _: not self.stopped, Workload.bodies(self))


@asynccontextmanager
async def bench_load(url: str, users: int, output_tokens: int) -> AsyncIterator[Tally]:
    """So many users of the benchmark's client, each on a new connection a request; the tally is complete afterwards."""
    client, tally = Client(url), Tally()
    model = await model_of(client)
    workload = Endless(load_prompts(), model, output_tokens, secrets.token_hex(2))
    await probe(client, workload)
    running = asyncio.create_task(closed_loop(client, workload, users, Limits()))
    try:
        yield tally
    finally:
        workload.stopped = True
        run = await running
    vars(tally).update(vars(Tally.of(summarize(f"{users} users", run).json())))


@asynccontextmanager
async def locust_load(url: str, users: int, output_tokens: int) -> AsyncIterator[Tally]:
    """So many users of loadtest/locustfile.py, who keep their connections. Raises BenchError if locust fails."""
    tally = Tally()
    with tempfile.NamedTemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        options = ["--headless", "--only-summary", "-H", url, "-u", str(users), "-r", str(users)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *options),
            *("--output-tokens", str(output_tokens), "--summary", str(summary)),
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            yield tally
            process.send_signal(signal.SIGTERM)
            await process.wait()
        finally:
            await end(process)
        if not summary.exists():
            log.seek(0)
            raise BenchError(f"locust failed:\n{log.read()[-3000:].decode(errors='replace')}")
        level = json.loads(summary.read_text())["levels"][0]
    vars(tally).update(vars(Tally.of(level)))


LOADS = {"bench": bench_load, "locust": locust_load}


async def _restart(server: Replica, stats: Client) -> Restart:
    clock = server.client.clock
    begun, retried = clock(), await _retried(stats)
    status = await server.terminate()
    left = clock()
    await server.start()
    await server.until_answers()
    return Restart(server.name, status, left - begun, clock() - left, await _retried(stats) - retried)


async def _retried(stats: Client) -> int:
    """How often HAProxy has sent a request again, by its own count."""
    rows = csv.DictReader((await stats.request("GET", "/;csv")).body.decode().splitlines())
    return sum(int(row["wretr"] or 0) for row in rows if row["svname"] == "BACKEND")


async def roll(
    makes: Sequence[MakeCommand],
    load: str = "bench",
    users: int = 8,
    output_tokens: int = 64,
    settle: float = 3.0,
    rounds: int = 1,
    check: str = "1s",
) -> Outcome:
    """Restart servers under load. Raises BenchError where something cannot be started.

    makes: the commands of the two servers; settle: seconds of load before, between and after the restarts; rounds: how
    often each is restarted; check: how often HAProxy asks them whether they are ready.
    """
    restarts = []
    async with (
        replicas(makes) as servers,
        haproxy(servers, check) as (proxy, stats),
        LOADS[load](proxy.url, users, output_tokens) as tally,
    ):
        await asyncio.sleep(settle)
        for server in itertools.chain.from_iterable(itertools.repeat(servers, rounds)):
            restarts.append(await _restart(server, stats))
            await asyncio.sleep(settle)
    return Outcome(tally, tuple(restarts))


def report(outcome: Outcome) -> str:
    tally = outcome.tally
    head = ["requests", "failed", "tokens", "longest gap", "longest wait"]
    failed = sum(tally.failures.values())
    row = [str(tally.requests), str(failed), str(tally.tokens), f"{tally.gap:.2f} s", f"{tally.wait:.2f} s"]
    lines = [align([head, row])]
    lines += [f"{count} failed: {reason}" for reason, count in tally.failures.items()]
    lines += [
        f"{one.server}: exit status {one.exit_status} after {one.leaving:.1f} s, "
        f"ready again {one.returning:.1f} s later, "
        f"{one.retried} requests retried"
        for one in outcome.restarts
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.rolling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--load", choices=list(LOADS), default="bench")
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--drain-delay", type=float, default=3.0, help="of the servers; 0 leaves all to the proxy")
    parser.add_argument("--check", default="1s", help="how often HAProxy asks for /ready")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds between the restarts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="after --, options of the servers")
    options = parser.parse_args(argv)
    make = sluice([*options.flags, f"--drain-delay={options.drain_delay}"])
    try:
        outcome = run_until_told(
            roll(
                (make, make),
                options.load,
                options.users,
                options.output_tokens,
                options.settle,
                options.rounds,
                options.check,
            )
        )
    except BenchError as error:
        print(f"loadtest.rolling: {error}", file=sys.stderr)
        return error.status
    print(report(outcome))
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
