"""The server does what its own OpenAPI document says, asked by schemathesis."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.object_authorization  # else imported, and parsed, in a test, while the server runs
from hypothesis import HealthCheck, settings
from prometheus_client import CollectorRegistry
from schemathesis.checks import CHECKS

from server.api.app import create_app
from server.config import ServeSettings
from server.metrics import Metrics
from tests.api.conftest import serve_fake
from tests.api.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The fake engine behind the real server, in a thread: schemathesis blocks the one it runs in."""
    started: Queue[tuple[str, Callable[[], object]]] = Queue()

    async def run() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serve_fake(FakeEngine(max_model_len=4096), debug_endpoints=True) as served:
            started.put((served.url, lambda: loop.call_soon_threadsafe(over.set)))
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    url, stop = started.get(timeout=30)
    yield url
    stop()
    thread.join()


def _document() -> dict[str, Any]:
    return create_app(FakeEngine(), Metrics(CollectorRegistry(), "tiny"), ServeSettings(model="tiny")).openapi()


schema = schemathesis.openapi.from_dict(_document())


def _check() -> Callable[[schemathesis.Case, str], None]:
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case, url: str) -> None:
        response = case.call(base_url=url, timeout=10)
        # What a schema cannot say (token ids there are, fields that exclude each other) is refused though it fits.
        case.validate_response(response, excluded_checks=[CHECKS.get_one("positive_data_acceptance")])

    return check


# A test each: those of one name would count as one where tests are dealt out to processes.
for operation in schema.get_all_operations():
    path, method = operation.ok().path, operation.ok().method.upper()
    name = re.sub(r"\W+", "_", f"test_{method} {path}".lower()).strip("_")
    globals()[name] = schema.include(path=path, method=method).parametrize()(_check())
