"""Do a router that nobody here wrote and our servers get on? Prefixes stay together, and a killed server is survived.

    python -m loadtest.routers --router '/tmp/venv/bin/sglang-router launch'
    python -m loadtest.routers --router /tmp/venv/bin/vllm-router -- --kv-bytes=512MiB

takes the command of any router with the options that both have (`pip install sglang-router vllm-router`, in an
environment of their own), starts two servers and the router in front of them, and

1. sends groups of prompts that begin alike, one of each group at a time, and shows which server had how many of a group
   and how much of the prompts came from the prefix cache;
2. kills one server with SIGKILL under load, counts what failed, starts it again and waits until it is used again.

Exit status: 0 if each group but for its first requests stayed together, the survivor served all but what the killed
server had open, and the killed one came back; else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import shlex
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.probe import long_prompt
from loadtest.replicas import MakeCommand, Replica, replicas, sluice
from loadtest.rolling import Endless
from server.bench.client import BenchError, Client
from server.bench.load import Limits, closed_loop, probe
from server.bench.process import free_ports, run_until_told
from server.bench.report import align, summarize
from server.bench.workload import load_prompts

CHECK_SECONDS = 2
BACK_SECONDS = 120.0
LOG_SECONDS = 5.0  # from the end of an answer to its line in the log


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer. `request_id` is the server's own, by which its log knows the request."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Group:
    """How many requests of one prefix each server had, and the tokens of all but the first of them."""

    servers: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Killing:
    """requests, failures: of the load around the kill; open_then: what the killed server had open.

    survived: requests that the other finished until the killed one was ready again.
    back: seconds from then until the router used it; None if it did not within `BACK_SECONDS`.
    """

    requests: int
    failures: dict[str, int]
    open_then: int
    survived: int
    back: float | None


@asynccontextmanager
async def routed(command: str, policy: str, servers: Sequence[Replica]) -> AsyncIterator[Replica]:
    """The router in front of the servers, ready; gone afterwards."""
    port, metrics_port = free_ports(2)
    with tempfile.NamedTemporaryFile() as log:
        options = [
            "--worker-urls", *(server.url for server in servers), "--policy", policy,
            "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port),
            "--health-check-interval-secs", str(CHECK_SECONDS), "--health-failure-threshold", "1",
            "--health-success-threshold", "1",
        ]  # fmt: skip
        router = Replica("the router", port, [*shlex.split(command), *options], Path(log.name))
        await router.start()
        try:
            await router.until_answers("/readiness")
            yield router
        finally:
            await router.end()


def _ask(url: str, model: str, prompt: str, tokens: int) -> Answer:
    """Raises OSError for what is refused and ValueError for a stream that is not one."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        events = [line[6:].strip() for line in response if line.startswith(b"data: ")]
    if len(events) < 2 or events[-1] != b"[DONE]":
        raise ValueError(f"the stream broke off: {events[-2:]!r}")
    last = json.loads(events[-2])
    usage = last["usage"]
    request_id = last["id"].removeprefix("cmpl-")
    return Answer(request_id, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


async def _served_by(servers: Sequence[Replica], answer: Answer) -> int:
    """Which server's log has the request."""
    for _ in range(int(LOG_SECONDS / 0.05)):
        for number, server in enumerate(servers):
            if answer.request_id.encode() in server.log.read_bytes():
                return number
        await asyncio.sleep(0.05)
    raise BenchError(f"no server has request {answer.request_id} in its log")


async def groups(
    url: str, servers: Sequence[Replica], model: str, count: int, requests: int, tokens: int
) -> list[Group]:
    """`count` groups of `requests` prompts that share `tokens` tokens or so, one of each group at a time."""
    prefixes = [long_prompt(tokens, seed) for seed in range(count)]
    answers: list[list[Answer]] = [[] for _ in prefixes]
    for number in range(requests):
        asking = [asyncio.to_thread(_ask, url, model, f"{prefix}\n\nQuestion {number}:", 8) for prefix in prefixes]
        for group, answer in enumerate(await asyncio.gather(*asking)):
            answers[group].append(answer)
    found = []
    for own in answers:
        had = Counter([await _served_by(servers, answer) for answer in own])
        later = own[1:]
        prompt, cached = (sum(getattr(one, name) for one in later) for name in ("prompt_tokens", "cached_tokens"))
        found.append(Group(tuple(had[number] for number in range(len(servers))), prompt, cached))
    return found


async def _finished(server: Replica) -> int:
    """Requests for generations that it has answered with 200, by its metrics."""
    text = (await server.client.request("GET", "/metrics")).body.decode()
    return int(
        sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("sluice_requests_total{"))
    )


async def kill(url: str, servers: Sequence[Replica], model: str, users: int, settle: float) -> Killing:
    """Kill the busier server under load; `settle` seconds of load before and after."""
    client = Client(url)
    workload = Endless(load_prompts(), model, 16, secrets.token_hex(2))
    await probe(client, workload)
    running = asyncio.create_task(closed_loop(client, workload, users, Limits()))
    try:
        await asyncio.sleep(settle)
        loads = [int((await server.get("/load"))["server_load"]) for server in servers]
        victim, survivor = sorted(zip(loads, servers, strict=True), key=lambda pair: pair[0], reverse=True)
        before = await _finished(survivor[1])
        await victim[1].kill()
        await asyncio.sleep(settle)
        await victim[1].start()
        await victim[1].until_answers()
        survived = await _finished(survivor[1]) - before
        back = await _until_used(victim[1])
    finally:
        workload.stopped = True
        level = summarize(f"{users} users", await running)
    return Killing(level.requests, level.failure_kinds, victim[0], survived, back)


async def _until_used(server: Replica) -> float | None:
    clock = server.client.clock
    begun = clock()
    while clock() - begun < BACK_SECONDS:
        with contextlib.suppress(OSError, TimeoutError):
            if await _finished(server):
                return clock() - begun
        await asyncio.sleep(0.2)
    return None


def report(found: Sequence[Group], killing: Killing) -> str:
    head = ["prefix", *(f"server {number}" for number in range(1, len(found[0].servers) + 1)), "from the cache"]
    rows = [
        [str(number), *map(str, group.servers), f"{group.cached_tokens / group.prompt_tokens:.0%}"]
        for number, group in enumerate(found, start=1)
    ]
    cached, prompt = (sum(getattr(group, name) for group in found) for name in ("cached_tokens", "prompt_tokens"))
    lines = [
        align([head, *rows]),
        f"{cached / prompt:.0%} of the prompts after each first one came from the cache",
    ]
    failed = sum(killing.failures.values())
    lines.append(
        f"killed a server with {killing.open_then} requests open: {failed} of {killing.requests} failed; "
        f"the other finished {killing.survived} meanwhile"
    )
    lines += [f"{count} failed: {reason}" for reason, count in killing.failures.items()]
    back = "was not used again" if killing.back is None else f"was used again {killing.back:.1f} s after it was ready"
    return "\n".join([*lines, f"the killed server {back}"])


def good(found: Sequence[Group], killing: Killing) -> bool:
    together = all(max(group.servers) >= sum(group.servers) - 1 for group in found)
    survived = sum(killing.failures.values()) <= killing.open_then and killing.survived > 0
    return together and survived and killing.back is not None


async def check(
    router: str, makes: Sequence[MakeCommand], model: str | None, options: argparse.Namespace
) -> tuple[list[Group], Killing]:
    """Raises BenchError where something cannot be started."""
    async with replicas(makes) as servers, routed(router, options.policy, servers) as front:
        name = model or str((await servers[0].get("/v1/models"))["data"][0]["id"])
        listed = [str(one["id"]) for one in (await front.get("/v1/models"))["data"]]
        print(f"the router lists {', '.join(listed)}")
        found = await groups(front.url, servers, name, options.groups, options.requests, options.prefix_tokens)
        return found, await kill(front.url, servers, name, options.users, options.settle)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.routers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--router", required=True, metavar="COMMAND", help="its program, and a subcommand if it has one"
    )
    parser.add_argument("--policy", default="cache_aware", help="one that the router knows")
    parser.add_argument("--groups", type=int, default=6, help="of prompts that begin alike")
    parser.add_argument("--requests", type=int, default=8, help="of a group")
    parser.add_argument("--prefix-tokens", type=int, default=400, help="that a group shares, about")
    parser.add_argument("--users", type=int, default=6, help="of the load under which a server is killed")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of load before and after")
    parser.add_argument("flags", nargs="*", help="after --, options of the servers")
    options = parser.parse_args(argv)
    make = sluice(options.flags)
    try:
        found, killing = run_until_told(check(options.router, (make, make), None, options))
    except BenchError as error:
        print(f"loadtest.routers: {error}", file=sys.stderr)
        return error.status
    print(report(found, killing))
    return 0 if good(found, killing) else 1


if __name__ == "__main__":
    sys.exit(main())
