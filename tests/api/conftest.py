"""A real HTTP server on loopback over the fake engine, on the loop of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from server.api.app import create_app
from server.api.server import bind, http_config, url_of
from server.config import ServeSettings
from server.metrics import Metrics
from tests.api.fake_engine import FakeEngine

PATH = "/v1/completions"


@dataclass
class Served:
    """What a test holds of a running server. `metrics()` are its series by name and labels."""

    engine: FakeEngine
    client: httpx.AsyncClient
    url: str
    registry: CollectorRegistry
    app: Any

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post(**body)
        assert response.status_code == 200, response.text
        answer = response.json()
        assert isinstance(answer, dict)
        return answer

    async def post(self, **body: Any) -> httpx.Response:
        return await self.client.post(PATH, json={"model": "tiny", **body})

    async def events(self, **body: Any) -> list[Any]:
        """The parsed events of a stream; the last is "[DONE]" unless it broke off."""
        response = await self.post(stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return parse_events(response.text)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"sluice_{name}", {"model_name": "tiny", **labels}) or 0.0


def parse_events(text: str) -> list[Any]:
    events: list[Any] = []
    for block in text.split("\n\n")[:-1]:
        assert "\n" not in block
        if block.startswith(":"):
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@asynccontextmanager
async def serve_fake(
    engine: FakeEngine | None = None, *, headers: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[Served]:
    engine = engine or FakeEngine()
    registry = CollectorRegistry()
    settings = ServeSettings(model="tiny", **options)
    app = create_app(engine, Metrics(registry, "tiny"), settings)
    listener = bind("127.0.0.1", 0)
    config = http_config(app)
    config.timeout_graceful_shutdown = 1
    http = uvicorn.Server(config)
    task = asyncio.create_task(http._serve([listener]))
    url = url_of(listener)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False, headers=headers) as client:
            yield Served(engine, client, url, registry, app)
    finally:
        engine.release()
        http.should_exit = True
        await task
        app.state.service.close()


@pytest.fixture
def serve() -> Serve:
    return serve_fake


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_fake() as served:
        yield served
