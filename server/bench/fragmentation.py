"""How much of the memory that requests hold on the server is empty, while they run."""

from __future__ import annotations

import asyncio
import re
from typing import Self

from server.bench.client import Client
from server.bench.stats import Distribution

POLL_SECONDS = 0.5
_RATIO = re.compile(rb"^sluice_kv_cache_fragmentation_ratio(?:\{.*\})? (\S+)$", re.MULTILINE)
_USED = re.compile(rb'^sluice_kv_cache_blocks\{.*state="used".*\} (\S+)$', re.MULTILINE)


class FragmentationWatch:
    """Asks the server for its metrics twice a second while it is entered.

    A sample is the share of the token slots in used blocks that hold no token: most are in the last block of each
    request, and those of a prompt in all its blocks until it is computed. There is none while no block is in use, and
    none at all of a server that has no such metric.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._samples: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    @property
    def samples(self) -> Distribution | None:
        """What was seen so far, as ratios of 0 to 1."""
        return Distribution.of(self._samples)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                response = await self._client.request("GET", "/metrics")
            except (OSError, TimeoutError):
                continue  # what is wrong with the server, the requests of the load report
            ratio, used = _RATIO.search(response.body), _USED.search(response.body)
            if response.status != 200 or ratio is None or used is None:
                return
            if float(used[1]):
                self._samples.append(float(ratio[1]))
