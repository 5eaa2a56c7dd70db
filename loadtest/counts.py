"""What a Sluice server counted while somebody put load on it."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from server.bench.client import BenchError, Client

POLL_SECONDS = 0.2
_SAMPLE = re.compile(rb"^sluice_(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)
RECEIVED, GENERATED = "requests_received_total", "generation_tokens_total"


def read(text: bytes) -> dict[str, float]:
    """Values of /metrics by name without the prefix, summed over labels; of a histogram its `_sum` and `_count`."""
    values: defaultdict[str, float] = defaultdict(float)
    for name, value in _SAMPLE.findall(text):
        values[name.decode()] += float(value)
    return values


@dataclass(frozen=True, slots=True)
class Counts:
    """Between the first request and the last token of an interval. Times in seconds."""

    requests: int
    prompt_tokens: float
    cached_tokens: float
    tokens: float
    seconds: float
    ttft_mean: float
    inter_token_mean: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Watch:
    """Polls /metrics while it is entered; when load began and ended is known to half of `POLL_SECONDS`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._polls: list[tuple[float, dict[str, float]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._poll()
        self._task = asyncio.create_task(self._keep_polling())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # `counts` polls again, and raises what went wrong

    async def counts(self) -> Counts:
        """Of the interval that ends now. Raises BenchError or OSError where there is nothing to count."""
        await self._poll()
        before, after = self._polls[0][1], self._polls[-1][1]

        def gained(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        def mean(name: str) -> float:
            count = gained(f"{name}_count")
            return gained(f"{name}_sum") / count if count else math.nan

        if not gained(GENERATED):
            raise BenchError("the server counted no token")
        begun = self._when(lambda values: values.get(RECEIVED, 0.0) > before.get(RECEIVED, 0.0))
        ended = self._when(lambda values: values.get(GENERATED) == after[GENERATED])
        return Counts(
            round(gained(RECEIVED)),
            gained("prompt_tokens_total"),
            gained("prompt_tokens_cached_total"),
            gained(GENERATED),
            max(POLL_SECONDS, ended - begun),
            mean("time_to_first_token_seconds"),
            mean("inter_token_latency_seconds"),
        )

    def _when(self, reached: Callable[[dict[str, float]], bool]) -> float:
        """The middle between the last poll before and the first one after."""
        return next((one[0] + two[0]) / 2 for one, two in itertools.pairwise(self._polls) if reached(two[1]))

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll()

    async def _poll(self) -> None:
        response = await self._client.request("GET", "/metrics")
        if response.status != 200:
            raise BenchError(f"/metrics answers {response.error}")
        self._polls.append((self._client.clock(), read(response.body)))
