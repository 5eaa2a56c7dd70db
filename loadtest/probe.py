"""How fast does /health answer while long prompts arrive? What a load balancer would see.

    python -m loadtest.probe                      # its own server, on the embedded model
    python -m loadtest.probe --url http://host:8000 --prompts 64 --tokens 8000

asks for /health a hundred times a second from a process of its own: first in peace, then while many prompts, each over
a connection of its own, arrive at the same moment and are computed. It prints the percentiles of both, in milliseconds.
Exit status: 0 if the 99th stays under --limit, else 1. The long requests are given up at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from loadtest.latency import Latencies, measure
from server.bench.client import BenchError
from server.bench.process import own_server, run_until_told

INTERVAL_SECONDS = 0.01


def measure_health(host: str, port: int, seconds: float) -> Latencies:
    return measure(host, port, "/health", INTERVAL_SECONDS, seconds)


def long_prompt(tokens: int, seed: int) -> str:
    """About so many tokens, for most tokenizers: a common word and its space are one."""
    rng = random.Random(seed)
    return " ".join(rng.choice(("time", "water", "house", "people", "music", "night", "world")) for _ in range(tokens))


def request_bytes(host: str, prompt: str) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "stream": True, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Burst:
    """Sends all requests at one moment, each on a connection of its own; `statuses` are those that came back."""

    def __init__(self, host: str, port: int, requests: Sequence[bytes]) -> None:
        self._connections = [socket.create_connection((host, port), timeout=600) for _ in requests]
        self._barrier = threading.Barrier(len(requests))
        self.statuses: list[int] = []
        self._threads = [
            threading.Thread(target=self._send, args=pair, daemon=True)
            for pair in zip(self._connections, requests, strict=True)
        ]

    def _send(self, connection: socket.socket, request: bytes) -> None:
        self._barrier.wait()
        try:
            connection.sendall(request)
            head = connection.recv(64)
        except OSError:
            return
        if head:
            self.statuses.append(int(head.split()[1]))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join()


def run(host: str, port: int, prompts: int, tokens: int, seconds: float) -> tuple[Latencies, Latencies, list[int]]:
    """Latencies in peace and under the burst, and the statuses of the long requests."""
    in_peace = measure_health(host, port, 3.0)
    burst = Burst(host, port, [request_bytes(host, long_prompt(tokens, seed)) for seed in range(prompts)])
    starter = threading.Timer(0.5, burst.start)  # once the probe is under way
    starter.start()
    under_load = measure_health(host, port, seconds)
    statuses = list(burst.statuses)
    burst.close()
    return in_peace, under_load, statuses


def report(url: str, options: argparse.Namespace) -> int:
    parts = urlsplit(url)
    assert parts.hostname is not None
    port = parts.port or 80
    in_peace, under_load, statuses = run(parts.hostname, port, options.prompts, options.tokens, options.seconds)
    print(f"/health in peace, ms:     {in_peace}")
    print(f"/health under load, ms:   {under_load}")
    taken = statuses.count(200)
    others = sorted(set(statuses) - {200})
    print(f"{options.prompts} prompts of {options.tokens} tokens: {taken} taken; other statuses: {others or None}")
    return 0 if taken == options.prompts and under_load.at(0.99) * 1000 < options.limit else 1


async def _with_own_server(options: argparse.Namespace) -> int:
    async with own_server(options.flags, lambda phase: None) as url:
        return await asyncio.to_thread(report, url, options)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.probe", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", help="a server that runs already; else one is started")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to ask under load")
    parser.add_argument("--limit", type=float, default=50.0, help="milliseconds that the 99th percentile may take")
    parser.add_argument("flags", nargs="*", help="after --, options of the server that is started")
    options = parser.parse_args(argv)
    try:
        return report(options.url, options) if options.url else run_until_told(_with_own_server(options))
    except BenchError as error:
        print(f"loadtest.probe: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main())
