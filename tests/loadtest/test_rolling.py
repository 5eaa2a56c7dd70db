"""Servers are replaced one by one behind a real HAProxy, and no client notices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import pytest

from loadtest.replicas import MakeCommand
from loadtest.rolling import Outcome, Restart, Tally, report, roll
from tests.programs import program


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    program("haproxy", "haproxy")


def fake(**options: object) -> MakeCommand:
    """A quick server with the life cycle of the real one."""

    def command(port: int) -> Sequence[str]:
        given = {"step_seconds": 0.005, "port": port, **options}
        return [sys.executable, "-m", "tests.api.serve_fake", json.dumps(given)]

    return command


async def test_no_request_is_lost() -> None:
    """The first server takes requests until the proxy has noticed, the second leaves it to the proxy to send those that
    are refused to the other."""
    outcome = await roll((fake(drain_delay=2.0), fake()), users=8, output_tokens=30, settle=0.3, check="300ms")
    assert outcome.good, report(outcome)
    assert outcome.tally.requests > 50
    assert outcome.tally.tokens == 30 * outcome.tally.requests
    in_time, at_once = outcome.restarts
    assert in_time.leaving >= 2.0
    assert in_time.retried == 0
    assert at_once.retried > 0


def test_what_failed_is_told() -> None:
    failed = {"HTTP 503: no": 2}
    tally = Tally.of(
        {"requests": 9, "failure_kinds": failed, "output_tokens": 70, "chunk_gap": {"max": 1.5}, "ttft": None}
    )
    outcome = Outcome(tally, (Restart("server 1", 0, 3.1, 5.0, 0), Restart("server 2", 143, 3.0, 5.0, 4)))
    assert not outcome.good
    text = report(outcome)
    assert "2 failed: HTTP 503: no" in text
    assert "1.50 s" in text
    assert "server 2: exit status 143 after 3.0 s" in text
    assert "4 requests retried" in text
    assert Outcome(Tally(requests=1), ()).good
    assert not Outcome(Tally(), ()).good
    assert not Outcome(Tally(requests=1), (Restart("server 1", 1, 0.0, 0.0, 0),)).good
