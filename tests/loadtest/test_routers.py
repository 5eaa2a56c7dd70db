"""What the check of routers says of what it found, and when it is content. It is run by hand, with a real router."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.replicas import Replica
from loadtest.routers import Answer, Group, Killing, _ask, _served_by, good, report
from server.bench.client import BenchError
from tests.api.conftest import serve_fake

TOGETHER = [Group((8, 0), 1000, 990), Group((1, 7), 1000, 800)]
SURVIVED = Killing(requests=40, failures={"stream cut before its end": 3}, open_then=3, survived=20, back=12.5)


def test_it_is_content_with_prefixes_together_and_only_open_requests_lost() -> None:
    assert good(TOGETHER, SURVIVED)
    assert not good([*TOGETHER, Group((5, 3), 1000, 500)], SURVIVED)
    assert not good(TOGETHER, replace(SURVIVED, open_then=2))
    assert not good(TOGETHER, replace(SURVIVED, survived=0))
    assert not good(TOGETHER, replace(SURVIVED, back=None))


def test_what_it_says() -> None:
    text = report(TOGETHER, SURVIVED)
    assert "80%" in text
    assert "90% of the prompts" in text
    assert "killed a server with 3 requests open: 3 of 40 failed; the other finished 20" in text
    assert "3 failed: stream cut before its end" in text
    assert "was used again 12.5 s" in text
    assert "was not used again" in report(TOGETHER, replace(SURVIVED, back=None))


async def test_an_answer_names_its_request_and_what_was_cached() -> None:
    async with serve_fake() as served:
        served.engine.cached_tokens = 3
        answer = await asyncio.to_thread(_ask, served.url, "tiny", "abcde", 2)
        assert (answer.prompt_tokens, answer.cached_tokens) == (5, 3)
        assert served.engine.requests[0].request_id.startswith(answer.request_id)


async def test_a_request_is_found_in_the_log_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.routers.LOG_SECONDS", 0.1)
    servers = [Replica(name, 1, [], tmp_path / name) for name in ("one", "two")]
    for server, seen in zip(servers, ("abc", "def"), strict=True):
        server.log.write_text(f"request request_id={seen} status=200\n")
    assert await _served_by(servers, Answer("def", 1, 0)) == 1
    with pytest.raises(BenchError, match="xyz"):
        await _served_by(servers, Answer("xyz", 1, 0))
