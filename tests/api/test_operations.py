"""Probes, metrics, ids, logs, limits: what an operator sees."""

from __future__ import annotations

import asyncio
import logging

import pytest

import server
from server.generation import Phase
from server.logs import JsonFormatter, TextFormatter
from tests.api.conftest import PATH, Serve, Served, parse_events
from tests.api.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("phase", "health", "ready"),
    [(Phase.LOADING, 503, 503), (Phase.READY, 200, 200), (Phase.DRAINING, 200, 503), (Phase.DEAD, 503, 503)],
)
async def test_probes_tell_the_phase(served: Served, phase: Phase, health: int, ready: int) -> None:
    served.engine.phase, served.engine.detail = phase, "reading weights (40%)"
    for path, status in (("/health", health), ("/ready", ready)):
        response = await served.client.get(path)
        assert response.status_code == status
        body = response.json()
        assert (body["phase"], body["detail"]) == (phase.value, "reading weights (40%)")
        head = await served.client.head(path)
        assert (head.status_code, head.content) == (status, b"")
    for request in (served.post(prompt="x"), served.post(prompt="x", stream=True), served.client.get("/v1/models")):
        response = await request
        if phase is Phase.READY:
            assert response.status_code == 200
            continue
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        error = response.json()["error"]
        assert error["code"] == f"engine_{phase.value}"
        if phase is not Phase.DRAINING:
            assert "40%" in error["message"]
    if phase is not Phase.READY:
        assert served.metric("request_rejections_total", reason=phase.value) == 2


async def test_draining_is_known_before_the_engine_hears_of_it(served: Served) -> None:
    served.app.state.service.leaving = served.app.state.service.draining = True
    assert (await served.client.get("/ready")).status_code == 503
    assert (await served.client.get("/health")).json()["phase"] == "draining"
    response = await served.post(prompt="x")
    assert (response.status_code, response.headers["connection"]) == (503, "close")


async def test_models(serve: Serve) -> None:
    async with serve(FakeEngine(names=("tiny", "org/other"))) as served:
        listed = (await served.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "org/other"]
        for model in listed["data"]:
            assert (await served.client.get(f"/v1/models/{model['id']}")).json() == model
        assert listed["data"][0] == {
            "id": "tiny", "object": "model", "created": 1_700_000_000, "owned_by": "sluice", "root": "/models/tiny",
            "max_model_len": 64,
            "default_sampling": {
                "temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0, "repetition_penalty": 1.0,
            },
        }  # fmt: skip
        response = await served.client.get("/v1/models/none")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


async def test_what_sglangs_router_asks(serve: Serve) -> None:
    async with serve(FakeEngine(names=("tiny", "org/other"))) as served:
        model = {"model_path": "/models/tiny", "tokenizer_path": "/models/tiny", "is_generation": True}
        described = {
            "model_path": "/models/tiny", "served_model_name": "tiny", "version": server.__version__,
            "max_running_requests": 4,
        }  # fmt: skip
        for path, expected in (("model_info", model), ("server_info", described)):
            for asked in (f"/{path}", f"/get_{path}"):
                assert (await served.client.get(asked)).json() == expected
        served.engine.phase = Phase.LOADING
        assert (await served.client.get("/model_info")).status_code == 503


async def test_version_and_schema(served: Served) -> None:
    assert (await served.client.get("/version")).json() == {"version": server.__version__}
    paths = (await served.client.get("/openapi.json")).json()["paths"]
    fields = paths[PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"prompt", "temperature", "logit_bias"} <= fields.keys()
    assert "include_usage" in str(fields["stream_options"])


async def test_metrics_are_served(served: Served) -> None:
    await served.complete(prompt="x")
    response = await served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    line = 'sluice_requests_received_total{endpoint="completions",model_name="tiny",streaming="false"} 1.0'
    assert line in response.text.splitlines()
    head = await served.client.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == response.headers["content-type"]


async def test_http_metrics_have_bounded_labels(served: Served) -> None:
    await served.complete(prompt="x")
    await served.client.get("/no/such/path")
    await served.client.request("BREW", "/health")
    await served.client.get("/v1/models/tiny")
    for method, route, status, outcome in (
        ("POST", PATH, "200", "ok"), ("GET", "unmatched", "404", "refused"), ("OTHER", "/health", "405", "refused"),
        ("GET", "/v1/models/{model_id}", "200", "ok"),
    ):  # fmt: skip
        labels = {"method": method, "route": route, "status": status}
        assert served.metric("http_requests_total", **labels, outcome=outcome) == 1, labels
        assert served.metric("http_request_duration_seconds_count", **labels) == 1


async def test_received_is_accepted_plus_refused(serve: Serve) -> None:
    """Counted by sequence, so that the books of the engine and of HTTP add up."""
    async with serve(FakeEngine(max_open=4)) as served:
        engine = served.engine
        engine.gate.clear()
        held = asyncio.create_task(served.post(prompt="x", n=3, stream=True))
        await engine.until(lambda: len(engine.open) == 3)
        response = await served.post(prompt=["x", "y"])
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert "3 requests" in error["message"]
        assert len(engine.streams) == 3  # all of a body is submitted, or none of it
        await served.post(prompt=7)
        engine.release()
        assert parse_events((await held).text)[-1] == "[DONE]"

        def received(streaming: str) -> float:
            return served.metric("requests_received_total", endpoint="completions", streaming=streaming)

        assert (received("true"), received("false")) == (3, 2)  # a body that is refused whole is one
        assert served.metric("request_rejections_total", reason="queue_full") == 1
        assert served.metric("request_rejections_total", reason="invalid") == 1


async def test_request_ids(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def ask(request_id: str | None, stream: bool) -> str:
        headers = {"x-request-id": request_id} if request_id is not None else {}
        body = {"prompt": "x", "stream": stream, "max_tokens": 1}
        response = await served.client.post(PATH, json=body, headers=headers)
        given = response.headers["x-request-id"]
        text = parse_events(response.text)[0] if stream else response.json()
        assert text["id"] == f"cmpl-{given}"
        assert served.engine.requests[-1].request_id.startswith(given)
        assert given in [vars(record).get("request_id") for record in caplog.records]
        return given

    for stream in (True, False):
        assert await ask("a.B-c_d:9", stream) == "a.B-c_d:9"
        fresh = {await ask(bad, stream) for bad in (None, "", "a b", "x" * 129, 'x"y', "x\ty")}
        assert len(fresh) == 6
        assert all(len(given) == 32 for given in fresh)
    response = await served.client.get("/health", headers={"x-request-id": "probe-1"})
    assert response.headers["x-request-id"] == "probe-1"


async def test_one_request_id_used_twice_at_once(served: Served) -> None:
    """A client's retry must not run into its own first try."""
    headers = {"x-request-id": "same"}
    served.engine.step_seconds = 0.001
    posts = [served.client.post(PATH, json={"prompt": "x", "n": 2}, headers=headers) for _ in range(3)]
    for response in await asyncio.gather(*posts):
        assert (response.status_code, response.json()["id"]) == (200, "cmpl-same")
    assert len({request.request_id for request in served.engine.requests}) == 6


async def test_one_line_a_request_none_a_probe(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.api")
    for path in ("/health", "/ready", "/metrics"):
        await served.client.get(path)
    served.engine.cached_tokens = 1
    await served.post(prompt="secret", n=2, max_tokens=3, stream=True)
    await served.post(prompt=7)
    finished, refused = (record.__dict__ for record in caplog.records if record.name.startswith("server.api"))
    assert finished["status"] == 200
    assert finished["outcome"] == "ok"
    assert finished["finish_reason"] == "length"
    assert (finished["prompt_tokens"], finished["cached_tokens"], finished["output_tokens"]) == (6, 1, 6)
    assert finished["queue_ms"] == 1.0
    assert 0 <= finished["ttft_ms"] <= finished["total_ms"]
    assert (refused["status"], refused["outcome"]) == (400, "refused")
    assert (refused["error"], refused["param"]) == ("invalid_value", "prompt")
    assert "secret" not in str([vars(record) for record in caplog.records])


async def test_a_path_without_a_route_is_logged_short_and_plain(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "server.api")
    await served.client.get("/%0aevil%1b[31m/" + "x" * 3000)
    (record,) = (record for record in caplog.records if record.name == "server.api.exchange")
    assert vars(record)["route"] == "unmatched"
    assert len(vars(record)["path"]) == 100
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record)
        assert "evil" in line
        assert line.isprintable()


async def test_load(served: Served) -> None:
    served.engine.gate.clear()
    before = (await served.client.get("/load")).json()
    assert (before["server_load"], before["running"], before["waiting"]) == (0, 0, 0)
    held = asyncio.create_task(served.post(prompt="x", n=3))
    await served.engine.until(lambda: len(served.engine.open) == 3)
    served.engine.kv_usage = 0.5
    now = (await served.client.get("/load")).json()
    assert (now["server_load"], now["running"], now["kv_cache_usage"]) == (3, 3, 0.5)
    assert (now["max_num_seqs"], now["waiting_tokens"]) == (4, 0)
    served.engine.release()
    await held


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_abort_by_id(served: Served, stream: bool, n: int) -> None:
    """By the header's id or by the one in the body; the reader gets an error, and the second time there is nothing."""
    engine = served.engine
    for abort_as, body in (("one", {"prompt": "x"}), ("cmpl-one", {"prompt": "x"})):
        engine.gate.clear()
        request = served.client.post(
            PATH, json={**body, "n": n, "stream": stream, "max_tokens": 9}, headers={"x-request-id": "one"}
        )
        held = asyncio.create_task(request)
        await engine.until(lambda: len(engine.open) == n)
        response = await served.client.delete(f"/v1/requests/{abort_as}")
        assert response.status_code == 200
        answer = response.json()
        assert answer["request_id"] == "one"
        assert len(set(answer["aborted"])) == n
        assert all(sequence.startswith("one/") for sequence in answer["aborted"])
        ended = await held
        error = parse_events(ended.text)[-1]["error"] if stream else ended.json()["error"]
        assert error["code"] == "aborted"
        assert ended.status_code == 200 or 400 <= ended.status_code < 500
        assert not engine.open
        engine.gate.set()
        gone = await served.client.delete(f"/v1/requests/{abort_as}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
    assert {fake.closed_by for fake in engine.streams} == {"api"}
    assert (await served.post(prompt="x")).status_code == 200


async def test_nobody_aborts_for_others(serve: Serve) -> None:
    async with serve(api_key=["ann", "bob"]) as served:
        engine = served.engine
        engine.gate.clear()
        by_ann = {"x-api-key": "ann", "x-request-id": "one"}
        held = asyncio.create_task(served.client.post(PATH, json={"prompt": "x"}, headers=by_ann))
        await engine.until(lambda: len(engine.open) == 1)
        assert (await served.client.delete("/v1/requests/one", headers={"x-api-key": "bob"})).status_code == 404
        assert len(engine.open) == 1
        assert (await served.client.delete("/v1/requests/one", headers={"x-api-key": "ann"})).status_code == 200
        await held
