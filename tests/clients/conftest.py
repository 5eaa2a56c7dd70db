"""Unmodified clients against a real server process on the embedded model; none of them may ask the internet.

The model is small and says silly things, so what is asserted is what the server owes: the same answer streamed and not,
usage that adds up, and arguments and JSON that fit their schema, forced where the model would not come to them itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.test_server import MODEL, Server

# Read when the clients are imported: no price list, no traces, no usage statistics from elsewhere.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["DO_NOT_TRACK"] = "1"

KEY = "sk-of-the-tests"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """A city in two words and a number."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome", "Oslo"]
    country: Literal["France", "Italy", "Norway"]
    districts: int = Field(ge=1, le=99)


WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def check_weather(arguments: Any) -> None:
    """The arguments of a call are what the schema of WEATHER allows."""
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome", "Oslo")
    assert arguments["days"] in range(1, 10)


class Served:
    """Where the server is, what it serves and the key it asks for."""

    model = MODEL
    key = KEY

    def __init__(self, url: str) -> None:
        self.url = url
        self.api = f"{url}/v1"


@pytest.fixture(scope="package")
def served(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--kv-bytes=256MiB", "--max-num-seqs=16", f"--api-key={KEY}", "--public-metrics")
    server = Server(tmp_path_factory.mktemp("clients") / "log", *flags)
    try:
        server.wait_until_ready()
        yield Served(server.url)
        server.settled_metrics()  # nothing that a client asked for runs on
        assert server.stop() == 0
    finally:
        server.process.kill()
