"""Percentiles, and a server that does not answer as it should."""

from __future__ import annotations

import pytest

from loadtest.latency import Latencies, measure


def test_percentiles() -> None:
    latencies = Latencies([i / 1000 for i in range(100)])
    assert (latencies.at(0.5), latencies.at(0.99), latencies.at(1.0)) == (0.05, 0.099, 0.099)


def test_who_does_not_answer_is_no_measurement(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EOFError):
        measure("127.0.0.1", 1, "/health", 0.01, 0.1)
    assert "ConnectionRefusedError" in capfd.readouterr().err
