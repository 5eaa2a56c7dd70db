"""The `llm` command, with the model in its `extra-openai-models.yaml` as its documentation says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.clients.conftest import Served

Ask = Callable[..., str]

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def ask(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Runs `llm ARGUMENTS` in a user directory that knows the server, and gives back what it prints."""
    directory = tmp_path_factory.mktemp("llm")
    common: dict[str, Any] = {"model_name": served.model, "api_base": served.api, "api_key_name": "sluice"}
    chat = {"model_id": "chat", "supports_schema": True, "supports_tools": True, **common}
    models = [chat, {"model_id": "completion", "completion": True, **common}]
    (directory / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    (directory / "keys.json").write_text(json.dumps({"sluice": served.key}))
    # The plugin that carries the embedded model needs llama.cpp, which is not there.
    environment = {**os.environ, "LLM_USER_PATH": str(directory), "LLM_LOAD_PLUGINS": ""}

    def run(*arguments: str, given: str = "") -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        done = subprocess.run(
            command, cwd=directory, env=environment, input=given, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


OPTIONS = ("-o", "temperature", "0", "-o", "max_tokens", "24")


@pytest.mark.parametrize(
    ("model", "prompt"), [("chat", "What is the capital of France?"), ("completion", "The sea is")]
)
def test_a_prompt_is_answered_the_same_streamed_and_whole(ask: Ask, model: str, prompt: str) -> None:
    whole = ask("-m", model, prompt, *OPTIONS, "--no-stream")
    streamed = ask("-m", model, prompt, *OPTIONS)
    assert whole.strip()
    assert streamed == whole
    if model == "completion":
        return  # for which llm does not ask for the usage of a stream
    logged = json.loads(ask("logs", "--json", "-n", "2"))
    assert logged[0]["input_tokens"] == logged[1]["input_tokens"] > 0
    assert logged[0]["output_tokens"] == logged[1]["output_tokens"] > 0


def test_a_conversation_goes_on(ask: Ask) -> None:
    printed = ask("chat", "-m", "chat", *OPTIONS, given="What is the capital of France?\nAnd of Italy?\nquit\n")
    assert "Paris" in printed
    first, second = json.loads(ask("logs", "--json", "-n", "2"))
    assert second["input_tokens"] > first["input_tokens"]
    assert second["conversation_id"] == first["conversation_id"]


def test_a_schema_is_kept_to(ask: Ask) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}}
    schema |= {"required": ["days"], "additionalProperties": False}
    assert json.loads(ask("-m", "chat", "How long?", "--schema", json.dumps(schema), *OPTIONS))["days"] in range(1, 10)


def test_tools_are_offered(ask: Ask) -> None:
    assert ask("-m", "chat", "What time is it?", "--tool", "llm_time", *OPTIONS).strip()
