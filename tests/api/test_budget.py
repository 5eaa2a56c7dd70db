"""What may be asked of the cache: a request's budget, the server's, and what the answer says of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import PATH, Serve, Served, parse_events
from tests.api.test_validation import check_error

ROUTES: dict[str, dict[str, Any]] = {
    PATH: {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
H2O, WINDOW = {"kv_policy": "h2o"}, {"kv_policy": "window"}


@pytest.mark.parametrize(
    ("options", "fields", "budget", "policy"),
    [
        ({}, {}, None, "h2o"),
        ({}, {"kv_budget": None, "kv_policy": None}, None, "h2o"),
        (H2O, {}, None, "h2o"),
        (H2O, {"kv_budget": 32}, 32, "h2o"),
        (H2O, {"kv_budget": 2**30, "kv_policy": "window"}, 2**30, "window"),
        (WINDOW, {}, None, "window"),
        (WINDOW, {"kv_budget": 33}, 33, "window"),
        (WINDOW, {"kv_budget": 33, "kv_policy": "window"}, 33, "window"),
        ({"kv_budget": 64}, {}, 64, "h2o"),
        ({"kv_budget": 64}, {"kv_policy": "window"}, 64, "window"),
        ({"kv_budget": 64}, {"kv_budget": 63}, 63, "h2o"),
        ({"kv_budget": 64}, {"kv_budget": 65}, 64, "h2o"),
        ({"kv_budget": 64, **WINDOW}, {"kv_budget": 2**30}, 64, "window"),
        ({"kv_budget": 64, "block_size": 32}, {"kv_budget": 64}, 64, "h2o"),
        ({"kv_budget": 8, "block_size": 1}, {}, 8, "h2o"),
    ],
)
async def test_the_smaller_budget_counts(
    serve: Serve, options: dict[str, Any], fields: dict[str, Any], budget: int | None, policy: str
) -> None:
    async with serve(**options) as served:
        for path, body in ROUTES.items():
            response = await served.client.post(path, json={"model": "tiny", **body, **fields})
            assert response.status_code == 200, response.text
            assert "x-sluice-ignored-parameters" not in response.headers
            request = served.engine.requests[-1]
            assert (request.kv_budget, request.kv_policy) == (budget, policy), path


async def test_all_choices_have_the_budget(serve: Serve) -> None:
    async with serve(**H2O) as served:
        await served.complete(prompt=["x", "y"], n=2, kv_budget=40)
        assert [request.kv_budget for request in served.engine.requests] == [40] * 4


@pytest.mark.parametrize(
    ("options", "fields", "param", "code", "words"),
    [
        ({}, {"kv_budget": 512}, "kv_budget", "unsupported_parameter", "--kv-policy"),
        ({"kv_policy": "none"}, {"kv_budget": 512}, "kv_budget", "unsupported_parameter", "--kv-policy"),
        ({}, {"kv_policy": "window"}, "kv_policy", "unsupported_parameter", "--kv-policy"),
        ({}, {"kv_budget": 7}, "kv_budget", "unsupported_parameter", "--kv-policy"),
        (WINDOW, {"kv_budget": 64, "kv_policy": "h2o"}, "kv_policy", "unsupported_parameter", "--kv-policy window"),
        (H2O, {"kv_policy": "h2o"}, "kv_policy", "invalid_value", "'kv_budget'"),
        (WINDOW, {"kv_policy": "window"}, "kv_policy", "invalid_value", "'kv_budget'"),
        (H2O, {"kv_budget": 31}, "kv_budget", "invalid_value", "at least 32 tokens with blocks of 16"),
        ({"kv_budget": 64}, {"kv_budget": 31}, "kv_budget", "invalid_value", "at least 32 tokens with blocks of 16"),
        ({"block_size": 64, **H2O}, {"kv_budget": 127}, "kv_budget", "invalid_value", "at least 128 tokens"),
        ({"block_size": 1, **H2O}, {"kv_budget": 7}, "kv_budget", "invalid_value", "at least 8 tokens with blocks of"),
        (H2O, {"kv_budget": 0}, "kv_budget", "invalid_value", "twice --block-size or more"),
        (H2O, {"kv_budget": 2**30 + 1}, "kv_budget", "invalid_value", "up to 1073741824"),
        (H2O, {"kv_budget": 64.0}, "kv_budget", "invalid_value", "an integer"),
        (H2O, {"kv_budget": True}, "kv_budget", "invalid_value", "an integer"),
        (H2O, {"kv_budget": 64, "kv_policy": "none"}, "kv_policy", "invalid_value", "h2o or window"),
        (H2O, {"kv_budget": 64, "kv_policy": "H2O"}, "kv_policy", "invalid_value", "h2o or window"),
    ],
)
async def test_what_the_server_does_not_do_is_refused(
    serve: Serve, options: dict[str, Any], fields: dict[str, Any], param: str, code: str, words: str
) -> None:
    async with serve(**options) as served:
        for path, body in ROUTES.items():
            for stream in (False, True):
                asked = {"model": "tiny", "stream": stream, **body, **fields}
                response = await served.client.post(path, json=asked)
                assert response.status_code == 400, (path, response.text)
                error = response.json()["error"] if path == "/v1/messages" else check_error(response)
                assert (error["param"], error["code"]) == (param, code)
                assert words in error["message"]
        assert not served.engine.requests


USAGE = {
    PATH: lambda body: body["usage"],
    "/v1/chat/completions": lambda body: body["usage"],
    "/v1/responses": lambda body: body.get("response", body)["usage"],
    "/v1/messages": lambda body: body["usage"],
}


async def test_usage_tells_what_was_evicted(serve: Serve) -> None:
    """Where there was a budget, streamed or not, so that an answer that may differ from the exact one shows it."""
    async with serve(**H2O) as served:
        for evicted in (0, 7):
            served.engine.evicted_tokens = evicted
            for path, body in ROUTES.items():
                read = USAGE[path]
                for fields, expected in (({}, None), ({"kv_budget": 32}, evicted)):
                    asked = {"model": "tiny", **body, **fields}
                    whole = (await served.client.post(path, json=asked)).json()
                    assert read(whole).get("kv_evicted_tokens") == expected, path
                    streamed = await _last_usage(served, path, asked)
                    assert read(streamed).get("kv_evicted_tokens") == expected, path


async def _last_usage(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last event with usage."""
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    text = (await served.client.post(path, json={**body, **options, "stream": True})).text
    plain = "\n\n".join(block.rpartition("\n")[2] for block in text.split("\n\n"))
    with_usage = [
        event
        for event in parse_events(plain)
        if isinstance(event, dict) and (event.get("usage") or event.get("response", {}).get("usage"))
    ]
    last: dict[str, Any] = with_usage[-1]
    return last


async def test_usage_adds_up_the_choices(serve: Serve) -> None:
    async with serve(kv_budget=64) as served:
        served.engine.evicted_tokens = 5
        answer = await served.complete(prompt=["x", "y"], n=2)
        assert answer["usage"]["kv_evicted_tokens"] == 20
