"""Words shared by the tests of faults that users of other servers reported: forced outputs, signs of life, an oracle.

Everything is seen from outside, over HTTP; the oracle is the unmodified Hugging Face model on one prompt at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.test_server import Server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
NEAR_TIE = 1e-3
MAX_ERROR_BYTES = 4096


def force(token_id: int) -> dict[str, Any]:
    """Fields that make the output this token again and again, whatever the model thinks."""
    return {"temperature": 0, "logit_bias": {str(token_id): 100}}


def post(server: Server, body: Any, path: str = COMPLETIONS, timeout: float = 60.0) -> httpx.Response:
    """A body as an object, or raw as bytes for what `json` would not write."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=timeout, trust_env=False)


def ask(server: Server, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """The answer to a body that must succeed."""
    response = post(server, body, path)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def events_of(text: str) -> list[Any]:
    """The events of a stream that must have come to its end, without the closing [DONE]."""
    lines = [line for line in text.split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.count("data: [DONE]") == 1
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream(server: Server, path: str = COMPLETIONS, **body: Any) -> list[Any]:
    """The events of the stream that a body asks for."""
    response = post(server, {**body, "stream": True}, path)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    response.content.decode()  # valid UTF-8 as a whole
    return events_of(response.text)


def text_of(events: Sequence[Any], choice: int = 0) -> str:
    """The text of one choice of a completion's stream."""
    return "".join(part["text"] for event in events for part in event["choices"] if part["index"] == choice)


def check_error(response: httpx.Response, *also: int) -> dict[str, Any]:
    """The error object of a refusal: 400, or one of the statuses that fit as well."""
    assert response.status_code in (400, *also), (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) <= MAX_ERROR_BYTES
    body = json.loads(response.text, parse_constant=_no_constant)
    error = body["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in response.text
    assert isinstance(error, dict)
    return error


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def check_alive(server: Server) -> None:
    """A short request is answered, and rightly, within ten seconds."""
    response = post(server, {"prompt": "x", "max_tokens": 2, **force(49)}, timeout=10)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "AA"


def check_idle(server: Server, within: float = 5.0) -> dict[str, float]:
    """The metrics, which show within so many seconds that nothing runs, waits or holds a block."""
    deadline = time.monotonic() + within
    while True:
        now = server.metrics()
        busy = {name: now[name] for name in ("requests_running", "requests_waiting", "kv_cache_blocks{state=used}")}
        if not any(busy.values()):
            return now
        assert time.monotonic() < deadline, busy
        time.sleep(0.05)


class Neighbour:
    """A forced stream of A's that runs while something else is tried, and must come to its end unharmed.

    Entered once its first token is there.
    """

    def __init__(self, server: Server, num_tokens: int = 80) -> None:
        self._url = f"{server.url}{COMPLETIONS}"
        self._num_tokens = num_tokens
        self._begun = threading.Event()
        self._text = ""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        assert self._begun.wait(30), "the neighbour's stream does not begin"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(120)
        if error is None:
            assert text_of(events_of(self._text)) == "A" * self._num_tokens

    def _read(self) -> None:
        body = {"prompt": "x", "max_tokens": self._num_tokens, "stream": True, **force(49)}
        with httpx.stream("POST", self._url, json=body, timeout=120, trust_env=False) as response:
            for piece in response.iter_text():
                self._text += piece
                self._begun.set()


class Oracle:
    """The Hugging Face model in float32 and its tokenizer, one prompt at a time and without any cache."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(ids), vocabulary]: row i is the distribution of what follows ids[: i + 1]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)])).logits[0]
        return logits.float().log_softmax(-1)

    def greedy(self, ids: Sequence[int], num_tokens: int, banned: Sequence[int] = ()) -> list[int]:
        """The likeliest tokens after `ids`; an end of sequence does not end them, `banned` ones are passed over."""
        output = list(ids)
        cache = None
        fed = output
        with torch.inference_mode():
            for _ in range(num_tokens):
                answer = self.model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True)
                cache = answer.past_key_values
                logits = answer.logits[0, -1].clone()
                logits[list(banned)] = -torch.inf
                fed = [int(logits.argmax())]
                output += fed
        return output[len(ids) :]

    def gap(self, ids: Sequence[int]) -> float:
        """How far apart the two likeliest tokens after `ids` are."""
        top = self.logprobs(ids)[-1].topk(2).values
        return float(top[0] - top[1])

    def is_near_tie(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two greedy outputs part at a near tie; they fail the test where they differ otherwise."""
        if list(one) == list(other):
            return False
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        assert at is not None, f"one output is longer than the other: {one} and {other}"
        gap = self.gap([*prompt, *one[:at]])
        assert gap < NEAR_TIE, f"{one} and {other} part at {at}, where the likeliest tokens are {gap} apart"
        return True
