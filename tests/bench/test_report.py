"""A run with a failure of each kind, summed up by hand."""

from __future__ import annotations

import json

import pytest

from server.bench.load import Run
from server.bench.prefix import PrefixComparison
from server.bench.record import Record
from server.bench.report import align, summarize, table


def good(start: float, first: float, gap: float, tokens: int, cached: int = 0) -> Record:
    arrivals = [start + first + gap * i for i in range(tokens)]
    return Record(
        intended=start,
        sent=start,
        ended=arrivals[-1],
        arrivals=arrivals,
        totals=list(range(1, tokens + 1)),
        status=200,
        finish_reason="length",
        prompt_tokens=10,
        completion_tokens=tokens,
        cached_tokens=cached,
    )


def failed(start: float, why: str) -> Record:
    return Record(intended=start, sent=start, ended=start + 1, arrivals=[start + 0.5], totals=[1], failure=why)


RUN = Run((good(0, 1.0, 0.25, 5), good(0, 2.0, 0.5, 3, cached=8), failed(1, "HTTP 503: full"), failed(9, "cut")), 2.0)


def test_rates_and_latencies_count_the_good_and_failures_are_named() -> None:
    level = summarize("2 clients", RUN)
    assert level.seconds == 10.0  # until the last request ended, failed or not
    assert (level.requests, level.failures) == (4, 2)
    assert level.failure_kinds == {"HTTP 503: full": 1, "cut": 1}
    assert (level.output_tokens, level.input_tokens, level.cached_tokens) == (8, 20, 8)
    assert (level.output_tokens_per_s, level.input_tokens_per_s, level.requests_per_s) == (0.8, 2.0, 0.2)
    assert level.ttft is not None
    assert (level.ttft.count, level.ttft.p50) == (2, 1.5)
    assert level.inter_token is not None
    assert (level.inter_token.count, level.inter_token.p50, level.inter_token.max) == (6, 0.25, 0.5)
    assert level.e2e is not None
    assert (level.e2e.p50, level.e2e.max) == (2.5, 3.0)
    assert level.tokens_per_chunk == 1.0
    assert level.client_cpu == pytest.approx(0.2)


def test_lateness_counts_from_the_intended_arrival() -> None:
    record = good(5.0, 1.0, 0.1, 2)
    record.intended = 3.0
    level = summarize("1 requests/s", Run((record,), 0.0))
    assert level.ttft is not None
    assert level.ttft.p50 == 3.0
    assert level.send_delay is not None
    assert level.send_delay.p50 == 2.0
    assert "sent up to 2000 ms late" in table([level])


def test_a_client_that_takes_much_of_the_machine_is_named() -> None:
    assert "the benchmark itself used 50% of a core" in table([summarize("1 client", Run(RUN.records, 5.0))])
    assert "itself" not in table([summarize("1 client", RUN)])


def test_nothing_good_still_makes_a_table() -> None:
    level = summarize("1 client", Run((failed(0, "cut"),), 0.0))
    assert level.ttft is None
    assert level.output_tokens_per_s == 0.0
    lines = table([level]).splitlines()
    assert lines[1].split() == ["1", "client", "1", "1", "0.0", "0.0", *["-"] * 9]
    assert "1 client: 1 failed: cut" in lines


def test_the_table_has_a_row_a_load_and_the_notes_that_matter() -> None:
    text = table([summarize("1 client", Run((good(0, 0.05, 0.25, 5),), 0.0)), summarize("2 clients", RUN)])
    head, first, second, *notes = text.splitlines()
    assert head.split()[:4] == ["load", "requests", "failed", "tok/s"]
    assert len(head) == len(first) == len(second)
    assert first.split()[2:] == ["1", "0", "4.8", "9.5", "50.0", "50.0", "50.0", *["250"] * 3, *["1050"] * 3]
    assert second.split()[2:5] == ["4", "2", "0.8"]
    assert "2 clients: 1 failed: HTTP 503: full" in notes
    assert "2 clients: 40% of the input came from the server's prefix cache" in notes
    assert not [note for note in notes if note.startswith("1 client:")]


def test_many_kinds_of_failure_are_cut_short_in_the_table_alone() -> None:
    level = summarize("9 clients", Run(tuple(failed(i, f"reason {i}") for i in range(9)), 0.0))
    assert "... and 4 more kinds" in table([level])
    assert len(level.json()["failure_kinds"]) == 9


def test_json_holds_the_distributions_in_seconds() -> None:
    data = json.loads(json.dumps(summarize("2 clients", RUN).json()))
    assert data["ttft"] == {"count": 2, "mean": 1.5, "p50": 1.5, "p95": 1.95, "p99": 1.99, "max": 2.0}
    assert data["failure_kinds"] == {"HTTP 503: full": 1, "cut": 1}


def test_align() -> None:
    assert align([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc   d"


def test_prefix_comparison_takes_medians_of_turns() -> None:
    def level(ttft: float, cached: int) -> object:
        return summarize("1 client", Run((good(0, ttft, 0.1, 2, cached),), 0.0))

    comparison = PrefixComparison(512, ((level(0.1, 8), level(0.3, 8)),), ((level(0.8, 0), level(1.2, 0)),))
    assert comparison.rows() == [
        {
            "load": "1 client",
            "ttft_on": pytest.approx(0.2),
            "ttft_off": pytest.approx(1.0),
            "ratio": pytest.approx(0.2),
            "cached_share": 0.8,
        }
    ]
    assert comparison.table().splitlines()[-1].split() == ["1", "client", "200.0", "1000.0", "0.200", "80%"]
    json.dumps(comparison.json())
