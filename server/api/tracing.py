"""Traces over OTLP/HTTP (OpenTelemetry): a span for each request, and under it one for each phase it went through.

They are made once the request is over, from what its line in the log says too: nothing is done while tokens flow, and
nothing at all unless --otlp-endpoint or the usual OTEL_ variables name a collector. The attributes are OpenTelemetry's
for HTTP and for generative AI, and those that vLLM uses for latencies.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import server
from server.api.exchange import Exchange
from server.config import ServeSettings, UnusableOption

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH = "/v1/traces"
_FLUSH_SECONDS = 2.0
_ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "error": "error.type",
}
"""What the log calls it, and what a span calls it."""


class Tracer:
    """Sends spans in batches from a thread of its own. What the collector does not take is lost, and not waited for."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        own = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "sluice"}
        resource = Resource.create({**own, "service.version": server.__version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sluice", server.__version__)
        self._model_name = model_name

    def record(
        self, exchange: Exchange, headers: Mapping[str, str], method: str, route: str, status: int
    ) -> str | None:
        """Spans of a request that is over; a `traceparent` among `headers` is their parent. The id of the trace.

        None if the trace is one of those that are not sampled.
        """
        from opentelemetry import propagate, trace

        end = time.time_ns()
        started = end - round((time.monotonic() - exchange.started) * 1e9)
        span = self._tracer.start_span(
            f"{method} {route}",
            propagate.extract(dict(headers)),
            trace.SpanKind.SERVER,
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "sluice.outcome": exchange.outcome,
                "sluice.request_id": exchange.request_id,
            },
            start_time=started,
        )
        if not span.is_recording():
            return None
        self._add_notes(span, exchange)
        for phase, begun, ended in _phases(exchange, (end - started) / 1e9):
            child = self._tracer.start_span(
                phase, trace.set_span_in_context(span), start_time=started + round(begun * 1e9)
            )
            child.end(started + round(ended * 1e9))
        if exchange.outcome == "error":
            span.set_status(trace.StatusCode.ERROR, str(exchange.notes.get("error", "")))
        span.end(end)
        return trace.format_trace_id(span.get_span_context().trace_id)

    def _add_notes(self, span: Span, exchange: Exchange) -> None:
        notes = exchange.notes
        if exchange.tenant:
            span.set_attribute("sluice.tenant", exchange.tenant)
        for name, attribute in _ATTRIBUTES.items():
            value = notes.get(name)
            if isinstance(value, str | int):
                span.set_attribute(attribute, value)
        for name, attribute in (
            ("queue_ms", "gen_ai.latency.time_in_queue"),
            ("ttft_ms", "gen_ai.latency.time_to_first_token"),
        ):
            milliseconds = notes.get(name)
            if isinstance(milliseconds, float):
                span.set_attribute(attribute, milliseconds / 1000)
        reasons = notes.get("finish_reason")
        if isinstance(reasons, str):
            span.set_attribute("gen_ai.response.finish_reasons", reasons.split(","))
            span.set_attribute("gen_ai.request.model", self._model_name)

    def close(self) -> None:
        """Send what there is, for a moment: a collector that is away must not hold up the end of the process."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)


def _phases(exchange: Exchange, total: float) -> list[tuple[str, float, float]]:
    """(name, begin, end) in seconds since the request came, of those it reached."""
    if exchange.submitted is None:
        return []
    submitted = exchange.submitted - exchange.started
    phases = [("prepare", 0.0, submitted)]
    queued, first = exchange.notes.get("queue_ms"), exchange.notes.get("ttft_ms")
    admitted = submitted + queued / 1000 if isinstance(queued, float) else total
    phases.append(("queue", submitted, admitted))
    if isinstance(queued, float):
        phases.append(("prefill", admitted, first / 1000 if isinstance(first, float) else total))
    if isinstance(first, float):
        phases.append(("decode", first / 1000, total))
    return phases


def load_tracer(settings: ServeSettings) -> Tracer | None:
    """The tracer that flags or environment ask for. Raises UnusableOption if a flag asks and the package is missing."""
    endpoint = settings.otlp_endpoint
    if endpoint is None and not any(os.environ.get(name) for name in _VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        message = "needs the extra 'otel': pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        if endpoint is not None:
            raise UnusableOption(f"--otlp-endpoint {message}") from None
        logger.warning("no traces are sent: the OTEL_EXPORTER_OTLP_ variables name a collector, which %s", message)
        return None
    if endpoint is not None and not endpoint.rstrip("/").endswith(_PATH):
        endpoint = endpoint.rstrip("/") + _PATH
    return Tracer(OTLPSpanExporter(endpoint), settings.served_names[0])
