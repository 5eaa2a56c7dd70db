"""Unmodified clients against a real server process on the embedded model; none of them may ask the internet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_server import MODEL, Server

# Read when the clients are imported: no price list, no traces, no usage statistics from elsewhere.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"
os.environ["DO_NOT_TRACK"] = "1"


class Served:
    """Where the server is, what it serves and how."""

    model = MODEL

    def __init__(self, url: str) -> None:
        self.url = url
        self.api = f"{url}/v1"
        self.key = "none"


@pytest.fixture(scope="package")
def served(embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Server(tmp_path_factory.mktemp("clients") / "log", "--kv-bytes=256MiB", "--max-num-seqs=16")
    try:
        server.wait_until_ready()
        yield Served(server.url)
        assert server.stop() == 0
    finally:
        server.process.kill()
