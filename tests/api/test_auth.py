"""With keys in use nothing answers without one, but for an explicit list."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import SecretStr

from server.api.auth import Keyring
from server.config import ServeSettings, UnusableOption
from tests.api.conftest import PATH, Serve, parse_events
from tests.api.test_validation import check_error

OPEN = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("HEAD", "/ready")}
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "BREW")


def paths_of(app: Any) -> set[str]:
    """A path of every route there is, found where the app itself looks, and some that lead nowhere."""
    found = {re.sub(r"\{[^}]*\}", "tiny", path) for path in app.openapi()["paths"]}
    for route in app.routes:
        if isinstance(route, APIRoute) or hasattr(route, "path"):
            found.add(re.sub(r"\{[^}]*\}", "tiny", route.path))
    assert {"/v1/completions", "/v1/models/tiny", "/metrics", "/openapi.json"} <= found
    return found | {"/", "/nowhere", "/v1", "/health/", "//health", "/health%2f..", "/HEALTH", "/v1/models/../health"}


@pytest.mark.parametrize("public_metrics", [False, True])
async def test_every_route_asks_for_a_key(serve: Serve, public_metrics: bool) -> None:
    open_to_all = OPEN | ({("GET", "/metrics"), ("HEAD", "/metrics")} if public_metrics else set())
    async with serve(api_key=["sesame"], public_metrics=public_metrics) as served:
        for path in sorted(paths_of(served.app)):
            for method in METHODS:
                for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}):
                    response = await served.client.request(method, path, headers=headers)
                    if (method, path) in open_to_all:
                        assert response.status_code == 200, (method, path)
                        continue
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    if method != "HEAD" and not path.startswith("/v1/messages"):
                        error = check_error(response, 401)
                        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sesame"},
        {"authorization": "bearer  sesame"},
        {"x-api-key": "sesame"},
        {"x-api-key": "sesame", "authorization": "Bearer other"},
        {"x-api-key": "other", "authorization": "Bearer sesame"},
        {"authorization": "Basic x", "x-api-key": "open"},
    ],
)
async def test_a_good_key_in_either_header(serve: Serve, headers: dict[str, str]) -> None:
    async with serve(api_key=["sesame", "open"]) as served:
        response = await served.client.post(PATH, json={"prompt": "x"}, headers=headers)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "authorization", ["sesame", "Bearer", "Bearer sesam", "Bearer sesame2", "Bearer Sesame", "Basic sesame", "é"]
)
async def test_a_key_must_be_whole(serve: Serve, authorization: str) -> None:
    async with serve(api_key=["sesame"]) as served:
        response = await served.client.get("/v1/models", headers={"authorization": authorization.encode("latin-1")})
        error = check_error(response, 401)
        assert "esam" not in error["message"]


async def test_a_connection_goes_on_after_a_401(serve: Serve) -> None:
    """Also where the body of the refused request comes after its answer."""
    async with serve(api_key=["sesame"]) as served:
        for size in (10, 10_000_000):
            assert (await served.client.post(PATH, content=b"x" * size)).status_code == 401
            assert (await served.client.get("/v1/models", headers={"x-api-key": "sesame"})).status_code == 200


async def test_the_log_names_the_holder_and_never_the_key(
    serve: Serve, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG, "server")
    path = tmp_path / "keys"
    path.write_text("ann:sesame\nsimsalabim\n")
    async with serve(api_key_file=str(path)) as served:
        for key in ("sesame", "simsalabim", "abracadabra"):
            headers = {"x-api-key": key}
            await served.client.post(PATH, json={"prompt": "x"}, headers=headers)
        lines = [vars(record) for record in caplog.records if record.message == "request"]
        assert [line.get("tenant") for line in lines] == ["ann", lines[1]["tenant"], None]
        assert re.fullmatch(r"key-[0-9a-f]{8}", lines[1]["tenant"])
        assert lines[2]["error"] == "invalid_api_key"
        everything = str([vars(record) for record in caplog.records if record.name.startswith("server")])
        document = (await served.client.get("/openapi.json", headers={"x-api-key": "sesame"})).text
        for key in ("sesame", "simsalabim", "abracadabra"):
            assert key not in everything
            assert key not in document
            assert key not in repr(served.app.state.service.settings)


# The file


def ring(path: Path, *keys: str) -> Keyring:
    return Keyring([SecretStr(key) for key in keys], path)


def test_what_a_file_of_keys_may_hold(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufeff# who may ask\n\n  ann:k1\nbob : k2\n carol:  k3 \nk4\ndan:k:5\nann:k6\n", encoding="utf-8")
    keys = ring(path, "k7")
    assert [keys.holder([f"k{i}"]) for i in (1, 2, 3, 6)] == ["ann", "bob", "carol", "ann"]
    assert keys.holder(["k:5"]) == "dan"
    unnamed = {keys.holder(["k4"]), keys.holder(["k7"])}
    assert len(unnamed) == 2
    assert None not in unnamed
    for wrong in ("", "ann", "ann:k1", "k8", "# who may ask"):
        assert keys.holder([wrong]) is None
    assert keys.holder([]) is None
    assert keys.holder(["nothing", "k2", "k1"]) == "bob"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no key"),
        ("# k\n\n", "holds no key"),
        ("ann: open sesame", "line 1"),
        ("k\nä:k2", "line 2"),
        ("ann:k\nbob:k", "line 2: this key is already another name's"),
        ("k" * 513, "line 1"),
        (":k", "line 1"),
        ("ann:", "line 1"),
        ("ann k", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UnusableOption, match=re.escape(complaint)) as caught:
        ring(path)
    assert "sesame" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnusableOption, match="cannot be read"):
        ring(tmp_path / "keys")
    with pytest.raises(UnusableOption, match="cannot be read"):
        ring(tmp_path)


def test_a_changed_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, now = tmp_path / "keys", 0.0
    path.write_text("old")
    keys = Keyring([], path, clock=lambda: now)

    def known(key: str) -> bool:
        return keys.holder([key]) is not None

    path.write_text("newer")
    assert known("old")  # a busy server looks once a second
    now += 1
    assert known("newer")
    assert not known("old")
    for bad in ("", "two words here"):
        path.write_text(bad)
        now += 1
        assert known("newer")
        assert "stay in use" in caplog.text
    path.unlink()
    now += 1
    assert known("newer")
    (tmp_path / "next").write_text("latest")
    os.replace(tmp_path / "next", path)  # as a Kubernetes secret changes
    now += 1
    assert known("latest")
    assert not known("newer")


# Cross-origin requests

ORIGIN = "https://app.example"


async def preflight(client: httpx.AsyncClient, origin: str, path: str = PATH) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return await client.options(path, headers=headers)


async def test_no_page_may_call_by_default(serve: Serve) -> None:
    async with serve() as served:
        response = await preflight(served.client, ORIGIN)
        assert response.status_code == 405
        answer = await served.client.post(PATH, json={"prompt": "x"}, headers={"origin": ORIGIN})
        assert not [name for name in (*response.headers, *answer.headers) if name.startswith("access-control")]


async def test_pages_of_a_named_origin_may_call(serve: Serve) -> None:
    async with serve(api_key=["sesame"], cors_origin=[ORIGIN]) as served:
        response = await preflight(served.client, ORIGIN)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-os" in response.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in response.headers
        for key, status in (("sesame", 200), ("wrong", 401)):
            headers = {"origin": ORIGIN, "x-api-key": key}
            answer = await served.client.post(PATH, json={"prompt": "x", "stream": True}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        error = check_error(await preflight(served.client, "https://evil.example"))
        assert error["code"] == "cors_refused"
        other = await served.client.get("/v1/models", headers={"origin": "https://evil.example", "x-api-key": "sesame"})
        assert "access-control-allow-origin" not in other.headers


async def test_all_pages(serve: Serve) -> None:
    async with serve(cors_origin=["*"]) as served:
        assert (await preflight(served.client, ORIGIN)).headers["access-control-allow-origin"] == "*"
        answer = await served.client.post(PATH, json={"prompt": "x", "stream": True}, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert parse_events(answer.text)[-1] == "[DONE]"


def test_no_usable_key_is_no_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from server.api.server import serve

    path = tmp_path / "keys"
    path.touch()
    assert serve(ServeSettings(model="tiny", port=0, api_key_file=str(path))) == 1
    assert "holds no key" in caplog.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_who_shares_cached_prefixes(serve: Serve, path: str) -> None:
    """All who send the same salt, or with `prefix_sharing` by key only those under one key's name."""
    bodies: list[dict[str, Any]] = [{}, {"cache_salt": "x"}]
    for sharing, num_salts in (("all", 2), ("key", 4)):
        async with serve(api_key=["sesame", "simsalabim"], prefix_sharing=sharing) as served:
            for key in ("sesame", "sesame", "simsalabim"):
                for body in bodies:
                    body = (
                        {"prompt": "x", "max_tokens": 1, **body}
                        if path == "/v1/completions"
                        else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **body}
                    )
                    response = await served.client.post(path, json=body, headers={"x-api-key": key})
                    assert response.status_code == 200
            assert len({request.cache_salt for request in served.engine.requests}) == num_salts
