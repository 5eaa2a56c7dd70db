"""The sums of a locust run, without locust."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loadtest.totals import Samples, Totals
from server.bench.record import Record


def record(sent: float, tokens: int, failure: str | None = None, late: float = 0.0) -> Record:
    arrivals = [sent + 0.5 + 0.1 * place for place in range(tokens)]
    return Record(
        intended=sent - late,
        sent=sent,
        ended=sent + 0.5 + 0.1 * tokens,
        arrivals=arrivals,
        totals=[None] * tokens,
        prompt_tokens=10,
        completion_tokens=tokens,
        cached_tokens=4,
        failure=failure,
    )


def test_quantiles_are_right_to_half_a_percent() -> None:
    values = np.random.default_rng(0).lognormal(-3, 1, 20_000)
    samples = Samples()
    for part in np.split(values, 40):
        samples.add(part)
    found = samples.distribution()
    assert found is not None
    assert (found.p50, found.p95, found.p99) == pytest.approx(np.percentile(values, (50, 95, 99)), rel=0.006)
    assert (found.count, found.mean, found.max) == pytest.approx((20_000, values.mean(), values.max()))
    assert len(samples.buckets) < 1500


def test_of_no_samples_nothing_is_said() -> None:
    samples = Samples()
    samples.add([])
    assert samples.distribution() is None
    assert Totals().levels()[0].requests == 0


def test_failures_add_nothing_but_their_names() -> None:
    totals = Totals()
    totals.add("short", record(0.0, 5))
    totals.add("short", record(1.0, 7, failure="stream cut before its end"))
    (level,) = totals.levels()
    assert (level.requests, level.failures, level.output_tokens) == (2, 1, 5)
    assert level.failure_kinds == {"stream cut before its end": 1}
    assert level.seconds == pytest.approx(2.2)  # the failed one took its share of the time
    assert level.requests_per_s == pytest.approx(1 / 2.2)


def test_what_was_sent_late_is_measured_from_when_it_was_due() -> None:
    totals = Totals()
    totals.add("short", record(3.0, 1, late=2.0))
    (level,) = totals.levels()
    assert level.ttft is not None
    assert level.send_delay is not None
    assert (level.ttft.mean, level.send_delay.mean) == pytest.approx((2.5, 2.0))


def test_parts_add_up_to_the_whole() -> None:
    whole, parts = Totals(), [Totals(), Totals()]
    for number in range(40):
        one = record(0.3 * number, 1 + number % 7, "HTTP 429: full" if number % 5 == 0 else None)
        kind = ("short", "chat")[number % 2]
        whole.add(kind, one)
        parts[number % 3 == 0].add(kind, one)
    for part in parts:
        part.given_up, part.cpu_seconds = 1, 0.25
    whole.given_up, whole.cpu_seconds = 2, 0.5
    merged = Totals()
    for part in parts:
        merged.merge(Totals.load(json.loads(json.dumps(part.dump()))))
    assert merged.given_up == whole.given_up
    for ours, theirs in zip(merged.levels(), whole.levels(), strict=True):
        expected = theirs.json()
        for key, value in ours.json().items():
            if isinstance(value, dict):
                assert value == pytest.approx(expected[key]), key
            else:
                assert value == pytest.approx(expected[key]), key
