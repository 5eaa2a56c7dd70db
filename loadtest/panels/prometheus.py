"""A Prometheus of our own, and what it answers."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from server.bench.client import Client
from server.bench.process import free_port, running

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules/sluice.yml"
SCRAPE_SECONDS = 1


class PrometheusError(Exception):
    """There is no Prometheus, or it refuses a query, or it has not seen what it should."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: its labels, and (Unix time in seconds, value) of each sample, NaN and all."""

    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]

    @property
    def finite(self) -> list[float]:
        return [value for _, value in self.samples if math.isfinite(value)]


class Prometheus:
    """The HTTP API of a Prometheus. All times are Unix times in seconds."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = Client(url, timeout=30.0)

    async def now(self, expression: str, at: float) -> list[Series]:
        """An instant query. An answer of raw samples (`metric[30s]`) comes as it is."""
        return _series(await self._get("query", query=expression, time=f"{at:.3f}"))

    async def over(self, expression: str, start: float, end: float) -> list[Series]:
        """A range query with a point each scrape."""
        return _series(
            await self._get(
                "query_range", query=expression, start=f"{start:.3f}", end=f"{end:.3f}", step=str(SCRAPE_SECONDS)
            )
        )

    async def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        response = await self._client.request("GET", f"/api/v1/{what}?{urlencode(parameters)}")
        if response.status != 200:
            raise PrometheusError(f"HTTP {response.status}: {response.body.decode(errors='replace')[:300].strip()}")
        data: dict[str, Any] = response.json()["data"]
        return data


def _series(data: dict[str, Any]) -> list[Series]:
    if data["resultType"] == "scalar":
        return [Series({}, [_sample(data["result"])])]
    return [
        Series(result["metric"], [_sample(pair) for pair in result.get("values") or [result["value"]]])
        for result in data["result"]
    ]


def _sample(pair: Sequence[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@asynccontextmanager
async def running_prometheus(targets: Sequence[str]) -> AsyncIterator[Prometheus]:
    """Scrape `targets` (host:port) each second as the job "sluice", the project's rules included; gone afterwards.

    Raises PrometheusError where there is no such program, and BenchError where it does not start.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise PrometheusError("prometheus is not installed; on Debian: apt-get install prometheus")
    with tempfile.TemporaryDirectory() as folder:
        config = _write_configuration(Path(folder), targets)
        port = free_port()
        command = (
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        )
        url = f"http://127.0.0.1:{port}"
        async with running(command, url, lambda _: None, "/-/ready"):
            yield Prometheus(url)


def _write_configuration(folder: Path, targets: Sequence[str]) -> Path:
    every = f"{SCRAPE_SECONDS}s"
    configuration = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "sluice", "static_configs": [{"targets": list(targets)}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    return path
