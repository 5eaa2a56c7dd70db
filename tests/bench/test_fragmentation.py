from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from server.bench import fragmentation
from server.bench.client import Client
from server.bench.fragmentation import FragmentationWatch
from tests.bench.fake_server import Exchange, Handler, serving

EMPTY = 'sluice_kv_cache_blocks{model_name="m",state="free"} 9.0\n'


def page(ratio: float, used: int) -> str:
    return (
        "# HELP sluice_kv_cache_fragmentation_ratio Share\n"
        f'sluice_kv_cache_fragmentation_ratio{{model_name="m"}} {ratio}\n'
        f'{EMPTY}sluice_kv_cache_blocks{{model_name="m",state="used"}} {used}.0\n'
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "POLL_SECONDS", 0.01)


def metrics(pages: Iterator[str | None], over: asyncio.Event) -> Handler:
    """Answers with each page in turn, None being a connection that breaks, and sets the event when none is left."""

    async def handle(exchange: Exchange) -> None:
        assert (exchange.method, exchange.path) == ("GET", "/metrics")
        text = next(pages, "")
        if text is None:
            exchange.cut()
        elif text:
            exchange.raw(200, text.encode())
        else:
            over.set()
            exchange.respond(404, {})

    return handle


async def watched(*pages: str | None) -> FragmentationWatch:
    over = asyncio.Event()
    async with serving(metrics(iter(pages), over)) as url, FragmentationWatch(Client(url)) as watch:
        await asyncio.wait_for(over.wait(), 20)
    return watch


async def test_samples_are_taken_while_blocks_are_in_use() -> None:
    samples = (await watched(page(0.0, 0), page(0.5, 3), page(0.0, 2), page(0.1, 1), page(0.0, 0))).samples
    assert samples is not None
    assert (samples.count, samples.max) == (3, 0.5)
    assert samples.mean == pytest.approx(0.2)


async def test_a_scrape_that_fails_is_left_out() -> None:
    samples = (await watched(page(0.5, 3), None, page(0.25, 3))).samples
    assert samples is not None
    assert samples.count == 2


@pytest.mark.parametrize("text", ["vllm:kv_cache_usage_perc 0.5\n", EMPTY])
async def test_a_server_without_the_metric_is_asked_once(text: str) -> None:
    asked = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal asked
        asked += 1
        exchange.raw(200, text.encode())

    async with serving(handle) as url, FragmentationWatch(Client(url)) as watch:
        await asyncio.sleep(0.3)
    assert watch.samples is None
    assert asked == 1


async def test_what_goes_wrong_in_the_load_is_what_is_raised() -> None:
    async def load() -> None:
        async with FragmentationWatch(Client("http://127.0.0.1:9")):
            await asyncio.sleep(0.05)
            raise LookupError("in the load")

    with pytest.raises(LookupError, match="in the load"):
        await load()
