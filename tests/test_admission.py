"""The bounds of the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.admission import Admission
from server.generation import BodyTooLarge, GenerationRequest, QueueFull
from server.step import SamplingParams


def request(length: int, leader: str | None = None) -> GenerationRequest:
    return GenerationRequest("r", (1,) * length, SamplingParams(), 8, leader=leader)


def test_the_number_of_requests_is_bounded() -> None:
    admission = Admission(4, 10, 1000)
    admission.check([request(1)] * 5, num_open=9)
    with pytest.raises(
        QueueFull, match=r"9 requests are open and 6 more would be 1 too many.*--max-queued-requests allow 14"
    ) as full:
        admission.check([request(1)] * 6, num_open=9)
    assert (full.value.reason, full.value.retry_after) == ("queue_full", 1)


def test_a_tenant_leaves_as_many_places_free_as_he_has() -> None:
    admission = Admission(4, 10, 1000)
    admission.check([request(1)] * 14, num_open=0, own_open=0)  # nobody else is there, and he has none
    admission.check([request(1)], num_open=6, own_open=6)
    with pytest.raises(QueueFull, match=r"7 requests of this API key are open and 1 more would be 1 too many"):
        admission.check([request(1)], num_open=7, own_open=7)
    admission.check([request(1)] * 6, num_open=7, own_open=0)
    admission.check([request(1)], num_open=7, own_open=None)


def test_the_tokens_that_wait_are_bounded_and_siblings_count_once() -> None:
    admission = Admission(4, 10, 100)
    first = [request(40), request(40, leader="r"), request(40, leader="r")]
    admission.check(first, num_open=0)
    for each in first:
        admission.enter(each)
    assert admission.waiting_tokens == 40
    admission.check([request(60)], num_open=3)
    with pytest.raises(
        QueueFull, match=r"40 prompt tokens are waiting and 61 more would be 1 too many.*--max-queued-tokens allows 100"
    ) as full:
        admission.check([request(61)], num_open=3)
    assert full.value.reason == "queue_tokens"
    admission.leave(first[0])
    admission.check([request(100)], num_open=3)


def test_a_body_that_could_never_wait_is_no_matter_of_patience() -> None:
    with pytest.raises(BodyTooLarge, match=r"101 tokens together.*at most 100"):
        Admission(4, 10, 100).check([request(50), request(51)], num_open=0)


def test_a_body_is_refused_before_it_is_read_when_nothing_would_fit() -> None:
    admission = Admission(4, 10, 100)
    admission.check_room(13, 1)
    with pytest.raises(QueueFull):
        admission.check_room(13, 2)
    admission.enter(request(100))
    with pytest.raises(QueueFull) as full:
        admission.check_room(1, 1)
    assert full.value.reason == "queue_tokens"


def test_prompts_that_start_while_a_refusal_is_worded_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread may empty the queue between any two looks at it."""
    admission = Admission(4, 10, 100)
    looks = iter((90, 90, 0, 0))
    monkeypatch.setattr(Admission, "waiting_tokens", property(lambda self: next(looks)))
    with pytest.raises(QueueFull, match="90 prompt tokens are waiting"):
        admission.check([request(20)], num_open=1)


@given(st.lists(st.floats(0, 10_000), max_size=50), st.integers(1, 300))
def test_retry_after_is_whole_seconds_within_a_minute(runs: list[float], places: int) -> None:
    admission = Admission(4, 10, 100)
    for seconds in runs:
        admission.ran(seconds)
    assert 1 <= admission.retry_after(places) <= 60


def test_retry_after_follows_how_long_requests_run() -> None:
    admission = Admission(4, 10, 100)
    for _ in range(200):
        admission.ran(8.0)
    assert (admission.retry_after(1), admission.retry_after(10)) == (2, 20)
