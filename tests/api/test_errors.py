"""The shape of errors, wherever they come from."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.errors import APIError
from tests.api.conftest import Serve, Served
from tests.api.test_validation import check_error


@given(
    message=st.text(max_size=50).map(lambda text: text * 200),
    param=st.none() | st.text(max_size=20).map(lambda text: text * 100),
)
def test_a_body_is_small_whatever_it_says(message: str, param: str | None) -> None:
    error = APIError(400, message, param=param)
    for body in (error.body, error.messages_body("r" * 128)):
        assert len(body) <= 4096
        assert json.loads(body)["error"]["code"] == "bad_request"
    if len(json.dumps(message)) <= 2400:
        assert error.message == message
    else:
        assert error.message.endswith("...")
        assert message.startswith(error.message[:-3])


@pytest.mark.parametrize("status", [400, 401, 404, 405, 408, 413, 415, 422, 429, 500, 503, 504])
def test_every_status_has_a_code_and_a_type(status: int) -> None:
    error = json.loads(APIError(status, "x").body)["error"]
    assert error["code"].isidentifier()
    assert error["type"].endswith("_error")
    if status >= 500:
        assert error["type"] != "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/none"])
async def test_clients_of_anthropic_can_read_errors(serve: Serve, path: str) -> None:
    """And those of OpenAI, who look into `error` only."""
    async with serve(api_key=["sesame"]) as served:
        for key, kinds in (
            ("wrong", {"authentication_error"}),
            ("sesame", {"invalid_request_error", "not_found_error"}),
        ):
            headers = {"x-api-key": key, "x-request-id": "one", "content-type": "application/json"}
            response = await served.client.post(path, content=b"{", headers=headers)
            body = response.json()
            assert body.keys() == {"type", "error", "request_id"}
            assert (body["type"], body["request_id"]) == ("error", "one")
            assert response.headers["request-id"] == "one"
            assert body["error"]["type"] in kinds
            assert body["error"].keys() == {"message", "type", "param", "code"}
        response = await served.client.get("/v1/messages", headers={"x-api-key": "sesame"})
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_a_path_that_only_looks_like_theirs(served: Served) -> None:
    error = check_error(await served.client.post("/v1/messagesx"), 404)
    assert error["code"] == "unknown_route"


async def test_a_fault_in_a_parameter_of_a_path(served: Served) -> None:
    @served.app.get("/squares/{number}")
    async def square(number: int) -> int:
        return number * number

    assert (await served.client.get("/squares/3")).json() == 9
    error = check_error(await served.client.get("/squares/three"))
    assert (error["param"], error["code"]) == ("number", "invalid_value")
