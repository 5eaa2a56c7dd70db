"""How fast a server answers a small request, asked over and over from a process of its own."""

from __future__ import annotations

import http.client
import math
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from server.bench.client import BenchError


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds that who asks regularly waits for answers, sorted."""

    seconds: list[float]

    def at(self, share: float) -> float:
        return self.seconds[min(len(self.seconds) - 1, int(share * len(self.seconds)))]

    def __str__(self) -> str:
        shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        parts = [f"{name} {self.at(share) * 1000:7.1f}" for name, share in shares]
        return f"{'  '.join(parts)}  ({len(self.seconds)} samples)"


def waits(seconds: float, interval: float) -> list[float]:
    """What an answer that took so long means for all who ask every `interval` seconds while it is computed.

    One asks on only after the answer, so a long one would count as little as a short one (coordinated omission).
    """
    return [seconds - place * interval for place in range(max(1, math.ceil(seconds / interval)))]


def _ask(host: str, port: int, path: str, interval: float, seconds: float, results: Connection) -> None:
    """Sends the seconds that one waits, or in a word why nobody knows."""
    try:
        results.send(_waited(host, port, path, interval, seconds))
    except (OSError, http.client.HTTPException) as error:
        results.send(f"{path} is not answered: {error!r}")


def _waited(host: str, port: int, path: str, interval: float, seconds: float) -> list[float]:
    """For so long, on one connection."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    waited: list[float] = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise http.client.HTTPException(f"status {response.status}")
        taken = time.perf_counter() - begun
        waited += waits(taken, interval)
        time.sleep(max(0.0, interval - taken))
    return sorted(waited)


def measure(host: str, port: int, path: str, interval: float, seconds: float) -> Latencies:
    """Ask for `path` every `interval` seconds, or as soon as the last answer is there, for `seconds`; see `waits`.

    Raises BenchError where an answer is no 200 or none comes.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (host, port, path, interval, seconds, theirs)
    probe = multiprocessing.get_context("spawn").Process(target=_ask, args=arguments)
    probe.start()
    theirs.close()
    try:
        waited: list[float] | str = ours.recv()
    finally:
        probe.join()
    if isinstance(waited, str):
        raise BenchError(waited)
    return Latencies(waited)
