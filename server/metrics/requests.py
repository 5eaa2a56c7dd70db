"""Requests: how many came, how they ended, how long they took, and whether that was as promised."""

from __future__ import annotations

from typing import get_args

from server.config import Objectives
from server.metrics.families import DURATION, GAP, LATENCY, TOKENS, Families
from server.reports import FINISH_REASONS, AbortCause, FinishedReport, RejectReason

_OWN_WISH = frozenset[AbortCause]({"disconnect", "api"})
"""Ends that a client chose: they tell nothing about the service."""


class RequestMetrics:
    """`received` and `rejected` are called on the HTTP loop, all else on the engine's thread."""

    def __init__(self, families: Families, endpoints: tuple[str, ...], objectives: Objectives) -> None:
        model = self._model = families.model
        self._objectives = objectives
        self._received = families.counter(
            "requests_received_total", "Requests (sequences) received, refused ones included.", "endpoint", "streaming"
        )
        self._requests = families.counter(
            "requests_total", "Requests (sequences) finished, by how they ended.", "endpoint", "finish_reason"
        )
        for endpoint in endpoints:
            for streaming in ("true", "false"):
                self._received.labels(model, endpoint, streaming)
            for finish_reason in FINISH_REASONS:
                self._requests.labels(model, endpoint, finish_reason)
        self._rejections = families.counter(
            "request_rejections_total", "Requests (sequences) refused before they reached the queue.", "reason"
        )
        for reason in get_args(RejectReason):
            self._rejections.labels(model, reason)
        self._aborts = families.counter(
            "request_aborts_total", "Requests (sequences) ended before they were complete, by what ended them.", "cause"
        )
        for cause in get_args(AbortCause):
            self._aborts.labels(model, cause)
        by_slo = families.counter(
            "requests_slo_total",
            "Requests (sequences) finished, by whether they met the objectives of slo_seconds; not those that their "
            "client gave up.",
            "met",
        )
        self._met, self._missed = (by_slo.labels(model, met) for met in ("true", "false"))
        slo = families.gauge(
            "slo_seconds",
            "Objectives that a request meets: seconds to its first token, and from token to token on average.",
            "of",
        )
        slo.labels(model, "ttft").set(objectives.ttft_seconds)
        slo.labels(model, "inter_token").set(objectives.inter_token_seconds)
        self._ttft = families.histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            _with_bound(LATENCY, objectives.ttft_seconds),
        ).series(model)
        self._gap = families.histogram(
            "inter_token_latency_seconds", "Seconds between consecutive tokens of a request.", GAP
        ).series(model)
        self._mean_gap = families.histogram(
            "request_time_per_output_token_seconds",
            "Seconds from token to token of a finished request on average, of those with two tokens or more.",
            _with_bound(GAP, objectives.inter_token_seconds),
        ).series(model)
        self._total = families.histogram(
            "request_duration_seconds", "Seconds from a request's arrival to its end, however it ended.", DURATION
        ).series(model)
        self._queue = families.histogram(
            "request_queue_duration_seconds", "Seconds from a request's arrival to its first admission.", DURATION
        ).series(model)
        self._prefill = families.histogram(
            "request_prefill_duration_seconds", "Seconds from a request's admission to its first token.", DURATION
        ).series(model)
        self._decode = families.histogram(
            "request_decode_duration_seconds", "Seconds from a request's first token to its last.", DURATION
        ).series(model)
        self._prompt_length = families.histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", TOKENS
        ).series(model)
        self._output_length = families.histogram(
            "request_generation_tokens", "Output tokens of a finished request.", TOKENS
        ).series(model)

    def received(self, endpoint: str, streaming: bool) -> None:
        """A request has arrived. To be called once for each sequence, before it is refused or submitted."""
        self._received.labels(self._model, endpoint, "true" if streaming else "false").inc()

    def rejected(self, reason: RejectReason) -> None:
        """A request counted by `received` was refused and will not finish."""
        self._rejections.labels(self._model, reason).inc()

    def first_token(self, seconds: float) -> None:
        """A request has its first token, `seconds` after it arrived."""
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` tokens came, each `seconds` after the one before it in its request."""
        self._gap.observe(seconds, count)

    def finished(self, report: FinishedReport) -> None:
        """A request counted by `received` is over."""
        self._requests.labels(self._model, report.endpoint, report.finish_reason).inc()
        if report.abort_cause is not None:
            self._aborts.labels(self._model, report.abort_cause).inc()
        if report.abort_cause not in _OWN_WISH:
            (self._met if self._meets_objectives(report) else self._missed).inc()
        self._total.observe(report.total_seconds)
        if report.queue_seconds is not None:
            self._queue.observe(report.queue_seconds)
        if report.prefill_seconds is not None:
            self._prefill.observe(report.prefill_seconds)
        if report.decode_seconds is not None:
            self._decode.observe(report.decode_seconds)
        if report.mean_gap_seconds is not None:
            self._mean_gap.observe(report.mean_gap_seconds)
        self._prompt_length.observe(report.prompt_tokens)
        self._output_length.observe(report.generation_tokens)

    def _meets_objectives(self, report: FinishedReport) -> bool:
        """Whether it got its answer in time; one without tokens, of a prompt that is only scored, at its end."""
        if report.finish_reason not in ("stop", "length"):
            return False
        ttft, gap = report.ttft_seconds, report.mean_gap_seconds
        started = report.total_seconds if ttft is None else ttft
        return started <= self._objectives.ttft_seconds and (gap or 0.0) <= self._objectives.inter_token_seconds


def _with_bound(bounds: tuple[float, ...], objective: float) -> tuple[float, ...]:
    """`bounds` and the objective: how many met it is then known and not estimated, and so is whether a quantile did."""
    return tuple(sorted({*bounds, float(objective)}))
