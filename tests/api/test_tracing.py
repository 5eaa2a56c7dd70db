"""Spans of finished requests, as a collector on loopback gets them."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.api import tracing
from server.api.tracing import load_tracer
from server.config import ServeSettings, UnusableOption
from tests.api.conftest import PATH, Serve

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@dataclass
class Collector:
    url: str
    paths: list[str] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    spans: list[Any] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(group.resource)
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def named(self, name: str) -> Any:
        (span,) = (span for span in self.spans if span.name == name)
        return span


def attributes(of: Any) -> dict[str, Any]:
    values = {}
    for item in of.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        values[item.key] = [entry.string_value for entry in value.values] if kind == "array_value" else value
    return values


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    listener = HTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{listener.server_port}")
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    yield collector
    listener.shutdown()
    thread.join()
    listener.server_close()


async def test_a_request_and_its_phases(serve: Serve, collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    async with serve(otlp_endpoint=collector.url, api_key=["sesame"]) as served:
        served.engine.step_seconds = 0.01
        headers = {"x-api-key": "sesame", "traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "one"}
        body = {"prompt": "secret", "max_tokens": 5, "stream": True}
        assert (await served.client.post(PATH, json=body, headers=headers)).status_code == 200
        for path in ("/health", "/ready"):
            await served.client.get(path)
    assert collector.paths == ["/v1/traces"]
    assert collector.resource["service.name"] == "sluice"
    whole = collector.named(f"POST {PATH}")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert whole.kind == whole.SPAN_KIND_SERVER
    values = attributes(whole)
    expected = {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "sluice.outcome": "ok",
        "sluice.request_id": "one",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.latency.time_in_queue": 0.001,
    }
    assert expected.items() <= values.items()
    assert 0 < values["gen_ai.latency.time_to_first_token"] < 5
    phases = [collector.named(name) for name in ("prepare", "queue", "prefill", "decode")]
    ends = [whole.start_time_unix_nano]
    for phase in phases:
        assert phase.parent_span_id == whole.span_id
        assert phase.start_time_unix_nano == pytest.approx(ends[-1], abs=2e5)  # the log rounds to 0.1 ms
        ends.append(phase.end_time_unix_nano)
    assert ends[-1] == pytest.approx(whole.end_time_unix_nano, abs=2e5)
    assert ends[-1] - ends[-2] >= 4 * 0.01 * 1e9 * 0.9
    assert len(collector.spans) == 5
    assert "secret" not in str(collector.spans)
    assert "sesame" not in str(collector.spans)
    assert TRACE in [vars(record).get("trace_id") for record in caplog.records]


async def test_refusals_and_failures(serve: Serve, collector: Collector) -> None:
    async with serve(otlp_endpoint=f"{collector.url}/v1/traces") as served:
        await served.client.post(PATH, json={"prompt": 7})
        await served.client.get("/nowhere")
        served.engine.gate.clear()
        held = asyncio.create_task(served.post(prompt="x", stream=True))
        await served.engine.until(lambda: len(served.engine.open) == 1)
        served.engine.fail("gone")
        await held
    refused, failed = sorted(
        (span for span in collector.spans if span.name == f"POST {PATH}"),
        key=lambda span: attributes(span)["http.response.status_code"],
        reverse=True,
    )
    assert attributes(refused)["sluice.outcome"] == "refused"
    assert attributes(refused)["error.type"] == "invalid_value"
    assert refused.status.code == refused.status.STATUS_CODE_UNSET
    assert attributes(failed)["sluice.outcome"] == "error"
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert collector.named("GET unmatched")
    assert collector.named("queue").parent_span_id == failed.span_id
    assert not [span for span in collector.spans if span.name in ("prefill", "decode")]


async def test_a_trace_that_its_origin_does_not_sample(serve: Serve, collector: Collector) -> None:
    async with serve(otlp_endpoint=collector.url) as served:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await served.client.post(PATH, json={"prompt": "x"}, headers=headers)
        await served.client.get("/version", headers={"traceparent": "nonsense"})
    assert [span.name for span in collector.spans] == ["GET /version"]


async def test_the_usual_variables(serve: Serve, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    async with serve() as served:
        await served.client.get("/version")
    assert collector.paths == ["/v1/traces"]
    assert collector.resource["service.name"] == "chat-eu"


async def test_a_collector_that_is_away_holds_nobody_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_SECONDS", 0.2)
    async with serve(otlp_endpoint="http://127.0.0.1:1") as served:
        async with asyncio.timeout(5):
            assert (await served.post(prompt="x")).status_code == 200


async def test_off_is_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert load_tracer(ServeSettings(model="tiny")) is None


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A flag is a demand; a variable may be there for other programs."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UnusableOption, match=r"--otlp-endpoint.*the extra .otel"):
        load_tracer(ServeSettings(model="tiny", otlp_endpoint="http://localhost:4318"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    assert load_tracer(ServeSettings(model="tiny")) is None
    assert "no traces are sent" in caplog.text
