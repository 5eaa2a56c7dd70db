"""A started engine over a tiny random model, and what tests ask of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from server.config import ServeSettings
from server.delivery import GenerationStream
from server.engine import AsyncEngine
from server.generation import GenerationRequest, Output, Phase
from server.metrics import Metrics
from server.step import SamplingParams

FORCED = SamplingParams(temperature=0.0, logit_bias={65: 100.0})
"""Draws token 65, one letter, for ever, whatever the model says."""


class Harness:
    """A started engine and the registry its metrics are in."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        options = {"kv_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
        self.registry = CollectorRegistry()
        settings = ServeSettings(model=str(checkpoint), served_model_name=["tiny"], **options)
        self.metrics = Metrics(self.registry, "tiny")
        self.engine = AsyncEngine(settings, self.metrics)
        self._count = 0

    async def ready(self) -> None:
        await self.engine.start()
        async with asyncio.timeout(60):
            while self.engine.status.phase is Phase.LOADING:
                await asyncio.sleep(0.02)
        assert self.engine.status.phase is Phase.READY, self.engine.status.detail

    def request(self, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **fields: Any) -> GenerationRequest:
        self._count += 1
        fields = {"params": FORCED, **fields}
        return GenerationRequest(f"r{self._count}", prompt, max_tokens=max_tokens, **fields)

    def submit(self, request: GenerationRequest) -> GenerationStream:
        (stream,) = self.engine.submit([request])
        return stream

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"sluice_{name}", {"model_name": "tiny", **labels})
        assert value is not None, name
        return value

    def total(self, name: str) -> float:
        """The sum over all series of a name."""
        samples = [sample for family in self.registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == f"sluice_{name}")

    async def settled(self) -> None:
        """Until the engine has reported an idle state."""
        async with asyncio.timeout(10):
            while any(map(self.value, ("requests_running", "requests_waiting", "kv_cache_usage_ratio"))):
                await asyncio.sleep(0.01)


async def collect(stream: GenerationStream) -> list[Output]:
    async with asyncio.timeout(30):
        return [output async for output in stream]


def text_of(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)
