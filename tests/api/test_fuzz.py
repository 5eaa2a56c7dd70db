"""No field of no route takes the server down, makes it wait, or reaches a neighbour.

A real server process on a tiny checkpoint. Every place in a rich, valid body, and every field its type or its table of
refusals knows, is given each of a list of values that have broken other servers, while a neighbour's greedy stream runs
over and over and its text must stay the same to the byte.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from server.api import wire
from server.api.chat.wire import CHAT, ChatRequest
from server.api.messages.wire import MESSAGES, MessagesRequest
from server.api.parameters import COMPLETIONS
from server.api.responses.wire import RESPONSES, ResponsesRequest
from tests.test_server import Server
from tests.tiny_checkpoint import VOCAB_SIZE, save_tiny_checkpoint

TEMPLATE = """{% for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"""
PATIENCE = 10.0
"""Seconds after which an answer that did not come is a hang."""
MOST_ERROR_BYTES = 4096
AT_ONCE = 6

NUMBERS = [
    "-1",
    "0",
    "1",
    "0.5",
    "-0.0",
    "2",
    "1e9",
    str(10**9),
    str(2**31),
    str(2**31 - 1),
    str(-(2**63) - 1),
    "1e308",
]
NO_JSON = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "01", "nul", "'x'", ""]
TEXTS = [
    '""',
    '"x"',
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\u0000"',
    '"\\u2028\\r\\n"',
    '"auto"',
    '"0"',
    f'"{"é" * 3000}"',
]
LISTS = [
    "[]",
    "[[]]",
    "[null]",
    '[""]',
    '["\\ud800"]',
    "[-1]",
    f"[{VOCAB_SIZE}]",
    f"[{2**31}]",
    "[1e9]",
    "[{}]",
    "[1,[2]]",
]
OBJECTS = [
    "{}",
    '{"":null}',
    '{"-1":1}',
    f'{{"{VOCAB_SIZE}":100}}',
    '{"65":1e9}',
    '{"65":NaN}',
    '{"type":"x"}',
    '{"\\ud800":1}',
]
DEEP = ["[" * 1000 + "]" * 1000, '{"a":' * 1000 + "1" + "}" * 1000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000]
VALUES = ["null", "true", "false", str(VOCAB_SIZE), *NUMBERS, *NO_JSON, *TEXTS, *LISTS, *OBJECTS, *DEEP]
SHORT = ["null", "true", "-1", str(VOCAB_SIZE), str(2**31), "1e9", "NaN", "1e999", '""', '"x"', '"\\ud800"', "[]"]
SHORT += ["[-1]", '["\\ud800"]', "{}", '{"\\ud800":1}', DEEP[0], DEEP[2]]
"""For what has been tried elsewhere already, and where the type is a schema's or a template's business."""

Path_ = tuple[str | int, ...]


@dataclass
class Target:
    """A route to fuzz: `example` is a valid body that shows much, `known` the names of fields its own tables have."""

    path: str
    example: dict[str, Any]
    known: Iterable[str]
    refused: Iterable[str] = ()

    def bodies(self) -> Iterator[tuple[str, str]]:
        """(what was changed, body) for every place and value."""
        for place in places(self.example):
            for value in VALUES if len(place) == 1 else SHORT:
                yield f"{place}={value[:40]}", substituted(self.example, place, value)
        tried = wire.DecodingFields.model_fields if self.path != "/v1/completions" else ()
        for name in sorted(set(self.known) - self.example.keys()):
            for value in SHORT if name in tried else VALUES:
                yield f"{name}={value[:40]}", added(self.example, name, value)
        for name in sorted(set(self.refused) - set(self.known) - self.example.keys()):
            for value in ("null", "false", "-1", '"\\ud800"', "[]", '{"a":[1]}', DEEP[0]):
                yield f"{name}={value[:40]}", added(self.example, name, value)


def places(node: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Where a value stands in `node`, inner ones too."""
    if at:
        yield at
    if isinstance(node, dict):
        for name, value in node.items():
            yield from places(value, (*at, name))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from places(value, (*at, index))


def substituted(node: Any, place: Path_, value: str) -> str:
    """`node` as JSON with the raw text `value` at `place`."""
    if not place:
        return value
    step, rest = place[0], place[1:]
    if isinstance(node, dict):
        parts = (
            f"{json.dumps(k)}:{substituted(v, rest, value) if k == step else json.dumps(v)}" for k, v in node.items()
        )
        return f"{{{','.join(parts)}}}"
    parts = (substituted(v, rest, value) if i == step else json.dumps(v) for i, v in enumerate(node))
    return f"[{','.join(parts)}]"


def added(example: dict[str, Any], name: str, value: str) -> str:
    return f"{json.dumps(example)[:-1]},{json.dumps(name)}:{value}}}"


PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
CHAT_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "user", "content": "u"},
]
SHORT_CHAT = {"messages": [{"role": "user", "content": "u"}], "max_tokens": 3}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "array", "items": {"type": "string", "pattern": "^x{1,2}$"}, "minItems": 1, "maxItems": 2},
        "c": {"anyOf": [{"const": None}, {"$ref": "#/$defs/d"}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "number", "multipleOf": 0.5}},
}

TARGETS = {
    "completions": Target(
        "/v1/completions",
        {
            "prompt": ["ab", "c"],
            "max_tokens": 2,
            "stop": ["zz", "yy"],
            "logit_bias": {"65": 1},
            "stop_token_ids": [70],
            "stream_options": {"include_usage": True},
            "stream": True,
            "logprobs": 2,
            "echo": True,
        },
        wire.CompletionRequest.model_fields,
        COMPLETIONS,
    ),
    "chat": Target(
        "/v1/chat/completions",
        {
            "messages": CHAT_MESSAGES,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "max_tokens": 2,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
        },
        ChatRequest.model_fields,
        CHAT,
    ),
    "chat, streamed": Target(
        "/v1/chat/completions",
        {
            **SHORT_CHAT,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [TOOL],
            "chat_template_kwargs": {"a": 1},
        },
        (),
    ),
    "chat, structured": Target(
        "/v1/chat/completions",
        {
            **SHORT_CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        },
        (),
    ),
    "completions, structured": Target(
        "/v1/completions",
        {"prompt": "x", "max_tokens": 3, "stream": True, "structured_outputs": {"choice": ["ab", "c"]}},
        (),
    ),
    "responses": Target(
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
            ],
            "instructions": "i",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "text"}},
            "max_output_tokens": 2,
            "stream": True,
        },
        ResponsesRequest.model_fields,
        RESPONSES,
    ),
    "messages": Target(
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "u"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "1"}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "f"},
            "max_tokens": 2,
            "stop_sequences": ["zz"],
            "stream": True,
        },
        MessagesRequest.model_fields,
        MESSAGES,
    ),
    "count_tokens": Target("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "u"}]}, ()),
    "input_tokens": Target("/v1/responses/input_tokens", {"input": "u"}, ()),
    "tokenize": Target("/tokenize", {"prompt": "x", "add_special_tokens": True, "return_token_strs": True}, ()),
    "detokenize": Target("/detokenize", {"tokens": [65, 66], "skip_special_tokens": True}, ()),
}

WHOLE_BODIES = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"{}",
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b'{"prompt":"\xff"}',
    b'{"prompt":"x"}{"prompt":"x"}',
    b"\x00" * 1000,
    b"[" * 1_000_000,
    b'{"prompt":' * 100_000,
    b'{"prompt":"' + b"x" * 3_000_000 + b'"}',
    b'{"prompt":"' + b"\\ud83d" * 100_000 + b'"}',
    b'{"prompt":[' + b"1," * 300_000 + b"1]}",
    b'{"prompt":[' + b'"x",' * 100_000 + b'"x"]}',
    b'{"prompt":"x","' + b"k" * 1_000_000 + b'":1}',
    b"{" + b",".join(b'"k%d":1' % i for i in range(50_000)) + b',"prompt":"x","max_tokens":1}',
    b'{"prompt":"x","max_tokens":1,' + b",".join([b'"n":"x"'] * 10_000) + b',"n":1}',
    b'{"prompt":"x","max_tokens":1,"\\ud800":1,"\\r\\nx-evil: 1":2}',
    b'{"model":"' + b"m" * 100_000 + b'","prompt":"x"}',
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    checkpoint = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    flags = ("--served-model-name=tiny", "--kv-blocks=512", "--max-num-seqs=16", "--max-num-batched-tokens=256")
    server = Server(tmp_path_factory.mktemp("fuzz") / "log", str(checkpoint), *flags)
    try:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0
    finally:
        server.process.kill()


NEIGHBOUR = {"prompt": "neighbour", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}


def neighbours_answer(client: httpx.Client) -> bytes:
    """The neighbour's text and how it ended; how many tokens share an event is a matter of time, not of content."""
    response = client.post("/v1/completions", json=NEIGHBOUR)
    assert response.status_code == 200
    *chunks, end = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    return f"{text} {choices[-1]['finish_reason']} {end}".encode()


class Neighbour(threading.Thread):
    """Asks for the same stream again and again, and keeps every answer that there was."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._over = threading.Event()
        self.answers: dict[bytes, int] = {}
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
                while not self._over.is_set():
                    answer = neighbours_answer(client)
                    self.answers[answer] = self.answers.get(answer, 0) + 1
        except Exception as failure:
            self.failure = failure

    def stop(self) -> None:
        self._over.set()
        self.join()
        if self.failure:
            raise self.failure


@asynccontextmanager
async def beside_a_neighbour(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client for the fuzz; at the end the neighbour must have seen nothing of it, and the server be as before."""
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as alone:
        expected = neighbours_answer(alone)
    neighbour = Neighbour(server.url)
    neighbour.start()
    limits = httpx.Limits(max_connections=AT_ONCE)
    try:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=httpx.Timeout(PATIENCE, pool=None), trust_env=False, limits=limits
        ) as client:
            yield client
    finally:
        await asyncio.to_thread(neighbour.stop)
    assert set(neighbour.answers) == {expected}
    assert sum(neighbour.answers.values()) >= 1
    health = await asyncio.to_thread(httpx.get, f"{server.url}/health", timeout=10)
    assert health.status_code == 200
    values = await asyncio.to_thread(server.settled_metrics)
    received = sum(value for name, value in values.items() if name.startswith("requests_received_total"))
    finished = sum(value for name, value in values.items() if name.startswith("requests_total"))
    rejected = sum(value for name, value in values.items() if name.startswith("request_rejections_total"))
    assert received == finished + rejected


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} in an answer")


def check_error(response: httpx.Response) -> None:
    """400 or its like, in OpenAI's shape, and short."""
    assert 400 <= response.status_code < 500
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < MOST_ERROR_BYTES
    body = json.loads(response.content.decode("ascii"), parse_constant=no_constant)
    if "type" in body:  # as Anthropic's clients read it
        assert body.pop("type") == "error"
        assert body.pop("request_id") == response.headers["x-request-id"]
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert isinstance(body["error"]["code"], str)
    assert body["error"]["param"] is None or isinstance(body["error"]["param"], str)


def check_answer(response: httpx.Response) -> None:
    """A success is whole: no error in mid-stream, a right end, JSON without NaN."""
    content = response.content.decode("utf-8")
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in content.split("\n") if line.startswith("data: ")]
        for data in events:
            if data != "[DONE]":
                chunk = json.loads(data, parse_constant=no_constant)
                assert "error" not in chunk
                assert chunk.get("type") not in ("error", "response.failed")
        assert events
    else:
        assert not json.loads(content, parse_constant=no_constant).get("error")


async def send(client: httpx.AsyncClient, path: str, what: str, body: str | bytes, failures: list[str]) -> int:
    """The status. What is wrong with the answer goes into `failures`, so that one run finds them all."""
    try:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert "x-request-id" in response.headers
        if response.status_code == 200:
            check_answer(response)
        else:
            check_error(response)
        return response.status_code
    except (AssertionError, ValueError, httpx.HTTPError) as failure:
        status = getattr(locals().get("response"), "status_code", None)
        failures.append(f"{what} -> {status} {type(failure).__name__} {str(failure)[:300]}")
        return status or 0


async def send_all(
    client: httpx.AsyncClient, path: str, bodies: list[tuple[str, str | bytes]]
) -> tuple[list[int], list[str]]:
    failures: list[str] = []
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(what: str, body: str | bytes) -> int:
        async with slots:
            return await send(client, path, what, body, failures)

    statuses = await asyncio.gather(*(one(what, body) for what, body in bodies))
    return statuses, failures


@pytest.mark.parametrize("name", TARGETS)
async def test_every_field_with_every_value(server: Server, name: str) -> None:
    target = TARGETS[name]
    async with beside_a_neighbour(server) as client:
        response = await client.post(target.path, json=target.example)
        assert response.status_code == 200, response.text
        statuses, failures = await send_all(client, target.path, list(target.bodies()))
    assert not failures, "\n".join(failures)
    assert {200, 400} <= set(statuses) <= {200, 400, 404, 413}


@pytest.mark.parametrize("name", TARGETS)
async def test_bodies_that_are_wrong_as_a_whole(server: Server, name: str) -> None:
    path = TARGETS[name].path
    async with beside_a_neighbour(server) as client:
        bodies: list[tuple[str, str | bytes]] = [(repr(body[:40]), body) for body in WHOLE_BODIES]
        _, failures = await send_all(client, path, bodies)
    assert not failures, "\n".join(failures)


async def test_of_a_repeated_key_the_last_counts(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False) as client:
        body = b'{"prompt":"x","max_tokens":"none","max_tokens":-1,"max_tokens":3,"ignore_eos":true}'
        response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.json()["usage"]["completion_tokens"] == 3
