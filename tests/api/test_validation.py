"""Everything that can be refused is refused before the first byte of a 200, in OpenAI's shape, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from server.config import ServeSettings
from tests.api.conftest import PATH, Serve, Served

JSON = {"content-type": "application/json"}
MAX_BODY_BYTES = ServeSettings.model_fields["max_body_size"].default


def check_error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 4096
    assert response.headers["x-request-id"]
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} in an error"))
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    assert isinstance(error, dict)
    return error


NOT_NUMBERS = ['"nan"', '"0.5"', "true", "[]", "{}", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 400]
RANGES = {
    "temperature": ["-0.1", "2.5", "-1e-300"],
    "top_p": ["0", "-0.1", "1.01"],
    "min_p": ["-0.1", "1.01"],
    "presence_penalty": ["-2.1", "2.1"],
    "frequency_penalty": ["-2.1", "2.1"],
    "repetition_penalty": ["0", "-1", "2.1"],
}
NOT_INTEGERS = ['"1"', "true", "1.0", "1.5", "[]", "{}", "NaN"]
INTEGERS = {
    "max_tokens": ["-1"],
    "min_tokens": ["-1", "17", "999999999"],
    "n": ["0", "-1", "129", "5000000"],
    "logprobs": ["-1", "21", "1000000000"],
    "top_k": ["-2", "-2147483649"],
    "seed": [str(2**63), str(-(2**63) - 1), "9" * 400],
    "priority": [str(2**31), "1e3"],
    "best_of": ["0", "-1", "129"],
    "truncate_prompt_tokens": ["0", "-2", "-1000000000"],
}
BOOLS = ("stream", "echo", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
         "cache_prompt", "return_token_ids", "return_tokens_as_token_ids")  # fmt: skip
OTHERS = {
    "stop": ['""', '[""]', "[1]", "7", '["a", null]', "{}", json.dumps(["x"] * 17), '"' + "x" * 1025 + '"',
        '"\\ud800"'],
    "logit_bias": [
        '{"258": 5}', '{"-1": 5}', '{"99999999999999999999": 1}', '{"abc": 1}', '{"1.5": 1}', '{"49": 1000}',
        '{"49": null}', '{"49": true}', '{"49": "1"}', '{"49": NaN}', '{"49": 1e400}', "[]", '"x"', '{"049": 1}',
    ],
    "allowed_token_ids": ["[258]", "[-1]", "[true]", "7", "[[1]]"],
    "stop_token_ids": ["[258]", "[-1]", "[1e20]", "[true]", '["1"]', "7", "{}", "[1.0]"],
    "prompt": [
        "[]", "[[]]", '["ok", []]', '""', '[""]', '["ok", ""]', "{}", "7", "null", "true", '[1, "a"]', "[1, [2]]",
        "[1.0]",
        "[258]", "[-1]", "[1e20]", "[99999999999999999999]", "[true]", "[[1], [true]]", '"\\ud800"', "[null]",
    ],
    "stream_options": [
        "{}", "[]", "7", '{"include_obfuscation": true}', '{"include_usage": 1}', '{"include_usage": true}',
    ],
    "model": ["7", '"none"', '""', '"\\ud800"'],
    "cache_salt": ["7", json.dumps("x" * 257), '"\\ud800"'],
}  # fmt: skip
BAD = [
    *[(name, value) for name in RANGES for value in [*NOT_NUMBERS, *RANGES[name]]],
    *[(name, value) for name in INTEGERS for value in [*NOT_INTEGERS, *INTEGERS[name]]],
    *[(name, value) for name in BOOLS for value in ("1", '"true"', "[]")],
    *[(name, value) for name, values in OTHERS.items() for value in values],
]


async def test_bad_values_are_refused_by_name(served: Served) -> None:
    """Streamed or not, and while a neighbour streams: its text does not change."""
    engine = served.engine
    engine.gate.clear()
    neighbour = asyncio.create_task(served.events(prompt="x", max_tokens=40, logit_bias={"49": 100}))
    await engine.until(lambda: len(engine.streams) == 1)
    for name, value in BAD:
        for stream in ("true", "false"):
            if name == "stream_options" and stream == "true" and value in ("{}", '{"include_usage": true}'):
                continue  # allowed there
            fields = {"prompt": '"x"', "stream": stream, name: value}
            body = "{" + ",".join(f'"{key}": {text}' for key, text in fields.items()) + "}"
            response = await served.client.post(PATH, content=body, headers=JSON)
            status = 404 if name == "model" and value[0] == '"' and "ud800" not in value else 400
            error = check_error(response, status)
            if not re.search("NaN|Infinity|e400", value):  # no JSON, or no number of Python's: there are no fields
                assert name in error["message"], (name, value, error)
                assert error["param"].split(".")[0] == name
    assert len(engine.streams) == 1
    engine.release()
    events = await neighbour
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "1" * 40


EDGES: list[dict[str, Any]] = [
    {name: None for name in (*RANGES, *INTEGERS, *BOOLS, *OTHERS) if name not in ("prompt", "max_tokens")},
    {"logit_bias": {}, "stop": [], "stop_token_ids": [], "n": 1, "top_k": 0, "logprobs": None},
    {"logit_bias": {"257": -100}, "temperature": 0, "top_p": 1, "top_k": -1, "stop": ["x"] * 16},
    {"temperature": 1e-300, "top_p": 1e-4, "presence_penalty": -2, "repetition_penalty": 2, "seed": 2**63 - 1},
    {
        "suffix": None,
        "best_of": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "tools": [],
        "suffix ": "",
    },
]


async def test_values_at_the_edge_pass(served: Served) -> None:
    for extra in EDGES:
        await served.complete(prompt="x", max_tokens=2, **extra)


async def test_best_of_needs_n_and_no_stream(served: Served) -> None:
    error = check_error(await served.post(prompt="x", n=3, best_of=2))
    assert (error["param"], error["message"]) == ("best_of", "'best_of' must be at least 'n', 3; got 2.")
    error = check_error(await served.post(prompt="x", best_of=2, stream=True))
    assert error["param"] == "best_of"
    assert "streamed" in error["message"]
    assert not served.engine.streams


async def test_a_suffix_needs_a_model_made_for_it(served: Served) -> None:
    error = check_error(await served.post(prompt="x", suffix="y"))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "fill in the middle" in error["message"]
    served.engine.bytes.named |= {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}
    for extra in ({"echo": True, "logprobs": 0}, {"truncate_prompt_tokens": 5}):
        assert check_error(await served.post(prompt="x", suffix="y", **extra))["param"] == "suffix"
    assert check_error(await served.post(prompt="x", suffix="y" * 60))["code"] == "context_length_exceeded"


async def test_no_token_to_draw_is_refused(served: Served) -> None:
    error = check_error(await served.post(prompt="x", allowed_token_ids=[257], min_tokens=1))
    assert (error["param"], "min_tokens" in error["message"]) == ("allowed_token_ids", True)
    await served.complete(prompt="x", allowed_token_ids=[257], min_tokens=1, ignore_eos=True)
    await served.complete(prompt="x", allowed_token_ids=[])
    assert served.engine.requests[-1].constraint is None


async def test_a_prompt_cannot_be_cut_to_nothing(served: Served) -> None:
    error = check_error(await served.post(prompt="x", truncate_prompt_tokens=-1, max_tokens=64))
    assert error["param"] == "truncate_prompt_tokens"
    assert "'max_tokens'" in error["message"]


async def test_messages_say_what_is_possible(served: Served) -> None:
    error = check_error(await served.post(prompt="x", temperature="0.5"))
    assert error == {
        "message": "'temperature' must be a number from 0 to 2; got \"0.5\".",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_value",
    }
    error = check_error(await served.post(prompt="x", logit_bias={"258": 1}))
    assert error["message"] == "'logit_bias' must hold token ids from 0 to 257; got 258."
    error = check_error(await served.post(prompt="x", stream=True, stream_options={"include_usage": 1}))
    assert error["param"] == "stream_options.include_usage"
    assert error["message"] == "'stream_options.include_usage' must be true or false; got 1."
    error = check_error(await served.post())
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")


async def test_prompt_that_leaves_no_room(served: Served) -> None:
    cases: list[tuple[Any, int | None, int]] = [
        ("x" * 64, 1, 64), ("x" * 65, 0, 65), ([1] * 100, None, 100), (["a", "x" * 64], 1, 64)
    ]  # fmt: skip
    for prompt, max_tokens, count in cases:
        for stream in (True, False):
            response = await served.post(prompt=prompt, max_tokens=max_tokens, echo=True, stream=stream)
            error = check_error(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            for word in (f"{count} tokens", "64", "--max-model-len"):
                assert word in error["message"]
    assert served.metric("request_rejections_total", reason="too_long") == 8


UNSUPPORTED = [
    ("tools", [{"type": "function"}], "tools"),
    ("guided_decoding_backend", "outlines", "library of grammars"),
    ("guided_whitespace_pattern", " *", "one line"),
    ("structural_tag", {"type": "structural_tag"}, "structured_outputs"),
    ("max_completion_tokens", 5, "max_tokens"),
    ("request_id", "mine", "x-request-id"),
    ("t_max_predict_ms", 500, "request_timeout"),
    ("return_tokens", True, "return_token_ids"),
    ("truncation_side", "right", "left"),
    ("repeat_penalty", 1.1, "repetition_penalty"),
    ("messages", [{"role": "user", "content": "hi"}], "prompt"),
    ("use_beam_search", True, "beam"),
    ("top_logprobs", 3, "logprobs"),
    ("prompt_logprobs", 0, "echo"),
    ("stream_interval", 8, "token"),
]


async def test_known_but_unhonoured_parameters_are_refused(served: Served) -> None:
    for name, value, hint in UNSUPPORTED:
        error = check_error(await served.post(prompt="x", **{name: value}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert hint in error["message"]


async def test_parameters_that_ask_for_nothing_pass(served: Served) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "best_of": 2,
        "typical_p": 1.0,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "mirostat": 0,
        "use_beam_search": False,
        "suffix": None,
        "guided_json": None,
        "user": "me",
    }
    response = await served.post(prompt="x", n=2, **neutral)
    assert response.status_code == 200
    assert "x-sluice-ignored-parameters" not in response.headers


async def test_unknown_fields_are_reported(served: Served) -> None:
    body = {"prompt": "x", "temprature": 1, "a b\r\nset-cookie: ☃": 2, "k" * 5000: 3, "": 4}
    for stream in (True, False):
        response = await served.post(stream=stream, **body)
        assert response.status_code == 200
        assert response.headers["x-sluice-ignored-parameters"] == f"temprature, a?b??set-cookie???, {'k' * 60}, ?"
        assert "set-cookie" not in response.headers
    response = await served.post(prompt="x", **{f"unknown{i}": i for i in range(500)})
    assert len(response.headers["x-sluice-ignored-parameters"]) < 1000


BODIES = [
    b'{"prompt":"x",y}', b"", b'{"prompt":"x"', b"[]", b"null", b"7", b'"s"', b"{}", b'{"prompt":"x"} x',
    b'{"prompt":"\xff"}', b"\xff\xfe{\x00}\x00", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt":"x","n":' + b"1" * 5000 + b"}", b'{"prompt":"x","a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"prompt":"x","top_p":"' + b"y" * 100_000 + b'"}', b'{"prompt":"x","model":"' + b"\\u0001" * 100_000 + b'"}',
]  # fmt: skip


async def test_bodies_that_are_no_request(served: Served) -> None:
    for body in BODIES:
        response = await served.client.post(PATH, content=body, headers=JSON)
        check_error(response, 404 if b"model" in body else 400)
    assert served.metric("requests_received_total", endpoint="completions", streaming="false") == len(BODIES)
    assert served.metric("request_rejections_total", reason="invalid") == len(BODIES)


async def test_last_of_duplicate_keys_counts_and_a_byte_order_mark_is_no_fault(served: Served) -> None:
    body = b'\xef\xbb\xbf{"prompt":"x","prompt":"yz","max_tokens":1}'
    response = await served.client.post(PATH, content=body, headers=JSON)
    assert response.json()["usage"]["prompt_tokens"] == 2


async def test_content_type_must_be_json(served: Served) -> None:
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        headers = {"content-type": content_type} if content_type else {}
        response = await served.client.post(PATH, content=b'{"prompt":"x"}', headers=headers)
        assert "application/json" in check_error(response, 415)["message"]


async def test_content_type_may_have_parameters(served: Served) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await served.client.post(PATH, content=b'{"prompt":"x"}', headers=headers)).status_code == 200


async def test_routes_and_methods(served: Served) -> None:
    assert "/nowhere" in check_error(await served.client.get("/nowhere"), 404)["message"]
    check_error(await served.client.post("/v1/completions/", json={}), 404)
    check_error(await served.client.get("/" + "x" * 20_000), 404)
    response = await served.client.get(PATH)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"
    error = check_error(await served.client.post(PATH, json={"prompt": "x", "model": "none"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert '"tiny"' in error["message"]


async def test_body_limit(served: Served) -> None:
    """Announced or not: the answer arrives, though the client sends all of the body first."""
    filler = b" " * MAX_BODY_BYTES

    async def chunks() -> Any:
        yield b'{"prompt":"x"'
        yield filler
        yield b"}"

    check_error(await served.client.post(PATH, content=b'{"prompt":"x"}' + filler, headers=JSON), 413)
    check_error(await served.client.post(PATH, content=chunks(), headers=JSON), 413)
    fits = b'{"prompt":"x"}' + b" " * (MAX_BODY_BYTES - 14)
    assert (await served.client.post(PATH, content=fits, headers=JSON)).status_code == 200


async def test_a_connection_survives_every_refusal(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    bodies = [
        ("POST", PATH, "application/json", b"{"), ("POST", PATH, "application/json", b"[]"), ("POST", PATH, "", b"{}"),
        ("POST", PATH, "text/plain", b"x" * 100_000), ("PUT", PATH, "application/json", b"{}"),
        ("POST", "/no", "", b"{}"),
        ("POST", PATH, "application/json", b'{"prompt":"x","model":"no"}'), ("DELETE", "/health", "", b""),
    ]  # fmt: skip
    for method, path, content_type, body in [*bodies, ("POST", PATH, "application/json", b'{"prompt":"x"}')]:
        fields = f"host: x\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}"
        writer.write(f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.split("content-length: ")[1].split("\r\n")[0])
        payload = json.loads(await reader.readexactly(length))
    assert payload["object"] == "text_completion"
    writer.close()
    await writer.wait_closed()


async def test_sequences_of_a_request_are_bounded(serve: Serve) -> None:
    async with serve(max_queued_requests=8) as served:
        assert (await served.post(prompt=["x"] * 4, n=2)).status_code == 200
        error = check_error(await served.post(prompt=["x"] * 3, n=3))
        assert "9 sequences" in error["message"]
        check_error(await served.post(prompt=["x"] * 9))


async def test_no_json_gives_a_server_error(served: Served) -> None:
    """Every field with every odd value: a client's fault is never a 5xx."""
    names = [*RANGES, *INTEGERS, *BOOLS, *OTHERS, "suffix", "unknown", "tools"]
    values: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 10**300, 0.5, -0.0, 1e308, "", "x", "\x00"]
    values += [[], [[]], {}, {"": None}, [None], [0], [[0, 1], "x"], {"0": 0}, ["x"] * 20, "\ud800" * 3, [{"a": [1]}]]
    for name in names:
        for value in values:
            body = json.dumps({"prompt": "x", "max_tokens": 1, name: value}).encode()
            response = await served.client.post(PATH, content=body, headers=JSON)
            assert response.status_code in (200, 400, 404), (name, value, response.text)
            if response.status_code != 200:
                check_error(response, response.status_code)
    assert not served.engine.open
    assert served.metric("http_requests_total", method="POST", route=PATH, status="500", outcome="error") == 0
