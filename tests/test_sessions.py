"""The books on open requests, step by step and without threads: what the metrics are told, at times that are given."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from server.admission import Admission
from server.delivery import GenerationStream
from server.generation import GenerationFailed, GenerationRequest, ModelCard, Output, QueueTimeout
from server.metrics import Metrics
from server.scheduler.scheduler import Scheduler
from server.session import Submission
from server.sessions import Sessions
from server.step import SamplingParams, StepPlan, StepResult
from server.text.tokenizer import Tokenizer
from tests.scheduler.driver import config

GREEDY = SamplingParams(temperature=0.0)


class Letters:
    """A tokenizer whose token is a letter."""

    spells = True
    trims_start = False
    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class Desk:
    """Sessions over a real scheduler whose every token is an A, and the metrics they report to."""

    def __init__(self, **changes: Any) -> None:
        self.registry = CollectorRegistry()
        self.scheduler = Scheduler(config(**changes))
        self.admission = Admission(self.scheduler.config.max_num_seqs, 100, 1000)
        card = ModelCard(("m",), "m", None, "float32", 128, 256, "", frozenset({0}), 0)
        self.sessions = Sessions(
            self.scheduler,
            self.admission,
            Metrics(self.registry, "m"),
            card,
            cast(Tokenizer, Letters()),
            queue_timeout=None,
            request_timeout=None,
        )
        self.began = time.monotonic()
        self._count = 0

    def submit(self, length: int = 4, max_tokens: int = 8, **fields: Any) -> GenerationRequest:
        self._count += 1
        request = GenerationRequest(f"r{self._count}", (self._count,) * length, GREEDY, max_tokens, **fields)
        self.admission.enter(request)
        stream = GenerationStream(request.request_id, lambda request_id, cause: None)
        self.sessions.take_in([request], [stream], Submission(self.began))
        return request

    def plan(self, after: float = 0.0) -> StepPlan:
        """Plan a step so many seconds after the beginning."""
        plan = self.scheduler.plan()
        assert plan is not None
        self.sessions.note_starts(self.began + after)
        return plan

    def finish(self, plan: StepPlan, after: float = 0.0) -> None:
        samples = len(plan.params)
        result = StepResult(np.full(samples, 65), (None,) * samples, ())
        self.sessions.advance(self.scheduler.commit(result, plan), self.began + after)
        self.sessions.report_pool()

    def step(self, started: float = 0.0, ended: float = 0.0) -> None:
        self.finish(self.plan(started), ended)

    def sent(self) -> list[Output | Exception]:
        sent, self.sessions.outbox = self.sessions.outbox, []
        return [output for _, output in sent]

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"sluice_{name}", {"model_name": "m", **labels})
        assert value is not None, name
        return value


def test_the_times_of_a_request_are_those_of_its_phases() -> None:
    desk = Desk()
    desk.submit(max_tokens=3)
    desk.step(2.0, 5.0)
    desk.step(5.0, 5.5)
    desk.step(5.5, 7.0)
    for name, seconds in {
        "time_to_first_token": 5.0,
        "inter_token_latency": 2.0,
        "request_queue_duration": 2.0,
        "request_prefill_duration": 3.0,
        "request_decode_duration": 2.0,
        "request_duration": 7.0,
    }.items():
        assert desk.value(f"{name}_seconds_sum") == pytest.approx(seconds), name
    assert desk.value("inter_token_latency_seconds_count") == 2
    assert desk.value("request_duration_seconds_count") == 1


def test_tokens_that_were_held_back_are_discarded_with_their_request() -> None:
    desk = Desk()
    request = desk.submit(stop=("AAAAA",))
    for _ in range(3):
        desk.step()
    assert desk.sent() == []
    desk.sessions.cut_off(request.request_id, "disconnect")
    assert desk.value("discarded_tokens_total", reason="disconnect") == 3
    assert desk.value("generation_tokens_total") == 0


@pytest.mark.parametrize("cause", ["disconnect", "api"])
def test_a_prompt_is_computed_in_vain_as_far_as_it_was_and_is_being_computed(cause: str) -> None:
    desk = Desk(max_num_batched_tokens=12)
    request = desk.submit(length=30)
    desk.step()
    plan = desk.plan()
    desk.sessions.cut_off(request.request_id, "api" if cause == "api" else "disconnect")
    desk.finish(plan)
    assert desk.value("discarded_tokens_total", reason="abort" if cause == "api" else "disconnect") == 24
    assert desk.value("kv_cache_usage_ratio") == 0


def test_a_failed_request_discards_what_it_held_back() -> None:
    desk = Desk()
    desk.submit(stop=("AAAAA",))
    desk.step()
    desk.step()
    desk.plan()
    desk.sessions.fail(desk.scheduler.fail([0]), GenerationFailed, "broken")
    (failure,) = desk.sent()
    assert isinstance(failure, GenerationFailed)
    assert str(failure) == "broken"
    assert desk.value("discarded_tokens_total", reason="error") == 2
    assert desk.value("requests_total", endpoint="completions", finish_reason="error") == 1


def test_what_a_preemption_cost_counts_once() -> None:
    desk = Desk(num_blocks=8, prefix_caching=False)
    desk.submit(length=8, max_tokens=20)
    desk.submit(length=8, max_tokens=20)
    while desk.scheduler.has_work:
        desk.step()
        desk.sessions.report_pool()
    lost = desk.scheduler.stats().recomputed_tokens
    assert desk.value("discarded_tokens_total", reason="preemption") == lost > 0
    assert desk.value("request_queue_duration_seconds_count") == 2
    assert desk.admission.waiting_tokens == 0


def test_only_requests_that_ran_to_their_end_tell_how_long_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    ran: list[float] = []
    monkeypatch.setattr(desk.admission, "ran", ran.append)
    aborted = desk.submit(max_tokens=2)
    desk.submit(max_tokens=2)
    desk.step(1.0, 2.0)
    desk.sessions.cut_off(aborted.request_id, "disconnect")
    waiting = desk.submit(max_tokens=2)
    desk.sessions.cut_off(waiting.request_id, "disconnect")
    desk.step(2.0, 4.0)
    assert ran == [pytest.approx(3.0)]


def test_each_request_leaves_the_queue_once_however_it_ends() -> None:
    desk = Desk(max_num_seqs=1)
    running, waiting = desk.submit(length=10), desk.submit(length=20)
    late = desk.submit(length=30, queue_timeout=1e-9)
    desk.submit(length=40, leader=running.request_id)
    desk.plan()
    assert desk.admission.waiting_tokens == 50
    desk.sessions.end_expired()
    assert desk.admission.waiting_tokens == 20
    (failure,) = desk.sent()
    assert isinstance(failure, QueueTimeout)
    for request in (running, waiting, late, waiting):
        desk.sessions.cut_off(request.request_id, "api")
    assert desk.admission.waiting_tokens == 0
    desk.sessions.close_all()
    assert desk.admission.waiting_tokens == 0
    assert desk.value("requests_total", endpoint="completions", finish_reason="error") == 1
    assert desk.value("requests_total", endpoint="completions", finish_reason="abort") == 3


def test_sequences_that_have_nothing_left_to_do_leave_nothing_behind() -> None:
    desk = Desk()
    for seed in range(3):
        desk.submit(max_tokens=3, timeout=50.0 + seed)
    while desk.scheduler.has_work:
        desk.step()
    sessions = desk.sessions
    assert (sessions._open, sessions._streams, sessions.next_deadline) == ({}, {}, None)
    assert sum(isinstance(each, Output) and each.finish_reason == "length" for each in desk.sent()) == 3
    assert dataclasses.asdict(desk.scheduler.stats())["blocks_used"] == 0
