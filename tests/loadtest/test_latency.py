"""Percentiles, and a server that does not answer as it should."""

from __future__ import annotations

import pytest

from loadtest.latency import Latencies, measure, waits
from server.bench.client import BenchError


def test_percentiles() -> None:
    latencies = Latencies([i / 1000 for i in range(100)])
    assert (latencies.at(0.5), latencies.at(0.99), latencies.at(1.0)) == (0.05, 0.099, 0.099)


def test_a_long_answer_counts_for_all_who_would_have_asked_meanwhile() -> None:
    assert waits(0.004, 0.05) == [0.004]
    assert waits(0.0, 0.05) == [0.0]
    assert waits(0.12, 0.05) == pytest.approx([0.12, 0.07, 0.02])
    stalled = Latencies(sorted([*waits(2.0, 0.05), *[0.004] * 560]))  # 2 s of 30: one answer of 561
    assert stalled.at(0.99) > 1.5


def test_who_does_not_answer_is_no_measurement() -> None:
    with pytest.raises(BenchError, match="/health is not answered: ConnectionRefusedError"):
        measure("127.0.0.1", 1, "/health", 0.01, 0.1)
