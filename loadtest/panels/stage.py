"""Servers under load and a Prometheus that watches them, ready to be asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loadtest.panels.prometheus import SCRAPE_SECONDS, Prometheus, PrometheusError, running_prometheus
from loadtest.panels.traffic import Scale, Traffic
from loadtest.panels.truth import Truth
from server.bench.client import Client
from server.bench.load import model_of
from server.bench.process import free_ports, own_server

SETTLE_SECONDS = 0.3  # until the engine has reported the last request's end
SCRAPE_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Window:
    """From the last sample before the load to the first one after it, Unix times in seconds.

    A rate over exactly this window extrapolates nothing: times its seconds it is the counter's increase.
    """

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Stage:
    """What there is to see once the load is over.

    windows, truths: of each instance, as Prometheus calls it; window, truth: of all together.
    busy_until: Unix time up to which all servers had requests.
    """

    prometheus: Prometheus
    model: str
    windows: dict[str, Window]
    truths: dict[str, Truth]
    window: Window
    truth: Truth
    busy_until: float


@asynccontextmanager
async def staged(scale: Scale, servers: int, show: Callable[[str], None]) -> AsyncIterator[Stage]:
    """Start `servers` servers, and put all of the load on each, at the same time.

    show: told what goes on.
    Raises BenchError or PrometheusError where something cannot be started or does not answer as it should.
    """
    ports = free_ports(servers)
    instances = [f"127.0.0.1:{port}" for port in ports]
    # Prometheus starts first, as its first scrape comes five seconds later, and ends first, as a server waits a while
    # for those who hold a connection to it.
    async with AsyncExitStack() as serving, running_prometheus(instances) as prometheus:
        show(f"{servers} servers start")
        starting = (own_server(scale.flags, lambda _: None, port) for port in ports)
        urls = await asyncio.gather(*map(serving.enter_async_context, starting))
        await _scrapes(prometheus, instances, time.time())
        show("the load runs")
        loads = [Traffic(url, scale, number) for number, url in enumerate(urls)]
        together = asyncio.Barrier(servers)
        begun = time.time()
        try:
            async with asyncio.TaskGroup() as group:  # one that fails takes the others along, which wait for it
                for load in loads:
                    group.create_task(load.run(together))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        ended = time.time()
        show("the load is over")
        await _scrapes(prometheus, instances, ended + SETTLE_SECONDS)
        windows = {instance: await _window(prometheus, instance, begun, ended) for instance in instances}
        yield Stage(
            prometheus,
            await model_of(Client(urls[0])),
            windows,
            {instance: Truth(load.outcomes, scale, 1) for instance, load in zip(instances, loads, strict=True)},
            Window(min(window.start for window in windows.values()), max(window.end for window in windows.values())),
            Truth([outcome for load in loads for outcome in load.outcomes], scale, servers),
            min(load.busy_until for load in loads),
        )


async def _scrapes(prometheus: Prometheus, instances: list[str], since: float) -> None:
    """Wait until each instance has been scraped after `since`."""
    deadline = time.time() + SCRAPE_TIMEOUT
    while True:
        times = [await _sample_times(prometheus, instance) for instance in instances]
        if all(known and known[-1] > since for known in times):
            return
        if time.time() > deadline:
            raise PrometheusError(f"not all of {instances} were scraped within {SCRAPE_TIMEOUT:g} s")
        await asyncio.sleep(SCRAPE_SECONDS / 4)


async def _window(prometheus: Prometheus, instance: str, begun: float, ended: float) -> Window:
    times = await _sample_times(prometheus, instance)
    before = [at for at in times if at <= begun]
    after = [at for at in times if at >= ended + SETTLE_SECONDS]
    return Window(before[-1], after[0])


async def _sample_times(prometheus: Prometheus, instance: str) -> list[float]:
    """When an instance has been scraped, as Prometheus stamped it."""
    found = await prometheus.now(f'sluice_build_info{{instance="{instance}"}}[1h]', time.time())
    return [at for series in found for at, _ in series.samples]
