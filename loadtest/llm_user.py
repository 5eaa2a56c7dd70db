"""A locust user that asks an OpenAI-compatible server for tokens, and what all users of a process share.

Responses are read with urllib3's `read1`, which returns as soon as there is something to read: FastHttpUser reads
blocks of 1024 bytes, so that several tokens seem to come at once, and `iter_lines(chunk_size=1)` costs a call a byte.
A parser of `sluice bench` accounts for what was read, so a stream is good here if and only if it is good there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import requests
from locust import HttpUser
from locust.env import Environment
from locust.exception import StopUser
from urllib3.exceptions import HTTPError

from loadtest.probe import long_prompt
from loadtest.totals import Totals
from server.bench.record import Record
from server.bench.stream import ERROR_BODY, CompletionBody, error_message, read_usage
from server.bench.workload import load_prompts

CONNECT_SECONDS = 10.0
FAILURE_PAUSE = 0.1  # seconds after a failure: users that are all refused would spin
STATUS_OVERLOADED = (429, 503)


class Load:
    """What the users of this process share: the model, the prompts, the totals and how many requests are left."""

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        assert options is not None
        self.environment = environment
        self.options: argparse.Namespace = options
        self.model: str = options.model or ""
        self.run = secrets.token_hex(2)
        self.prefix = f"[{self.run}] " + long_prompt(options.prefix_tokens, options.seed) + "\n\n"
        self.long_text = long_prompt(options.long_prompt_tokens, options.seed)
        self.totals = Totals()
        self._cpu = time.process_time()
        self._prompts = self._shuffled(load_prompts(Path(options.prompts) if options.prompts else None))
        self._tags = itertools.count(1)
        self.ending = False
        self._started = self._ended = 0

    def find_model(self, host: str) -> None:
        """Set `model` to the server's first where none was named. Raises RuntimeError where it lists none."""
        if self.options.model:
            return
        try:
            response = requests.get(f"{host}/v1/models", headers=self.headers, timeout=CONNECT_SECONDS)
            response.raise_for_status()
            self.model = str(response.json()["data"][0]["id"])
        except (requests.RequestException, ValueError, LookupError, TypeError) as error:
            raise RuntimeError(f"{host}/v1/models names no model ({error}): say one with --model") from None

    @property
    def headers(self) -> dict[str, str]:
        # A compressed stream would come in the blocks of the compressor.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        return headers

    def tag(self) -> str:
        """Starts a prompt that no cache has seen."""
        return f"[{self.run}-{next(self._tags)}] "

    def prompt(self) -> str:
        """The next of the prompts, each once before any comes twice."""
        prompt = next(self._prompts)
        return prompt if self.options.verbatim else self.tag() + prompt

    def cpu_seconds(self) -> float:
        """That this process used since the last call."""
        before, self._cpu = self._cpu, time.process_time()
        return self._cpu - before

    def begin(self) -> None:
        """Take one of `--requests`; raises StopUser when none is left or the run is about to end.

        Locust kills users that wait, also those that have just woken up and sent something.
        """
        if self.ending or (self.options.requests and self._started >= self.options.requests):
            raise StopUser
        self._started += 1

    def end(self, kind: str, record: Record) -> None:
        self.totals.add(kind, record)
        self._ended += 1
        if self._ended == self.options.requests:
            # In a greenlet of its own: quitting waits for the user that ended this request.
            runner = self.environment.runner
            assert runner is not None, "users run"
            gevent.spawn(runner.quit)

    def _shuffled(self, prompts: list[str]) -> Iterator[str]:
        order = random.Random(self.options.seed)
        while True:
            yield from order.sample(prompts, len(prompts))


class LLMUser(HttpUser):
    """Sends one request after the other. Subclasses say in `turn` which.

    kind: of its requests, as the rows name it.
    load: set for the process before any user starts.
    """

    abstract = True
    kind = ""
    load: Load

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.client.trust_env = False  # neither a proxy nor ~/.netrc shall get in between
        self._due: float | None = None
        self._pause = 0.0

    @property
    def options(self) -> argparse.Namespace:
        return self.load.options

    def on_start(self) -> None:
        if rate := self.options.constant_throughput:
            # Users arrive in batches; their schedules shall not stay in step.
            self._due = time.perf_counter() + random.random() / rate
            gevent.sleep(self._due - time.perf_counter())

    def wait_time(self) -> float:
        """Until the next request is due: by the user's schedule, or after the time to think."""
        pause, self._pause = self._pause, 0.0
        if self._due is None:
            return max(pause, float(self.options.think_time))
        self._due += 1.0 / float(self.options.constant_throughput)
        return max(0.0, pause, self._due - time.perf_counter())

    def complete(self, prompt: str) -> str:
        """Ask for what follows a prompt, as the options say by completions or by chat."""
        if self.options.chat:
            return self.chat([{"role": "user", "content": prompt}])
        return self.ask("/v1/completions", {"prompt": prompt})

    def chat(self, messages: list[dict[str, str]], stream: bool = True) -> str:
        return self.ask("/v1/chat/completions", {"messages": messages}, stream)

    def ask(self, path: str, asked: dict[str, Any], stream: bool = True) -> str:
        """Send one request, account for it and return the text of the answer."""
        options = self.options
        body = {"model": self.load.model, "max_tokens": options.output_tokens, "temperature": options.temperature}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if options.ignore_eos:
            body["ignore_eos"] = True
        self.load.begin()
        sent = time.perf_counter()
        record = Record(intended=sent if self._due is None else min(self._due, sent), sent=sent)
        try:
            text = self._exchange(path, json.dumps(body | asked).encode(), record, stream)
        except gevent.GreenletExit:
            self.load.totals.given_up += 1
            raise
        self.load.end(self.kind, record)
        if record.failure is None:
            self._show(record)
        else:
            self._pause = max(self._pause, FAILURE_PAUSE)
        return text

    def _exchange(self, path: str, body: bytes, record: Record, stream: bool) -> str:
        texts: list[str] = []
        with self.client.post(
            path,
            data=body,
            headers=self.load.headers,
            name=f"{path} {self.kind}",
            stream=True,  # also for an answer in one piece: its size is then known once it was read, not at the headers
            catch_response=True,
            timeout=(CONNECT_SECONDS, self.options.request_timeout),
        ) as response:
            size = 0
            record.status = response.status_code or None
            if record.status is None:
                record.fail(f"no response: {_cause(response.error)}")
            elif record.status != 200:
                answer = response.raw.read(ERROR_BODY)
                record.fail(f"HTTP {record.status}: {error_message(answer)}")
                self._heed(response)
            else:
                reader = CompletionBody(record) if stream else WholeBody(record)
                size = self._read(response, reader, record)
                texts = reader.texts
            record.ended = time.perf_counter()
            if record.failure is not None:
                response.close()  # what may still come is not the answer to the next request
            assert record.e2e is not None
            response.request_meta["response_time"] = record.e2e * 1000
            response.request_meta["response_length"] = size
            response.success() if record.failure is None else response.failure(record.failure)
        return "".join(texts)

    def _read(self, response: Any, reader: CompletionBody | WholeBody, record: Record) -> int:
        """Feed the body to the reader until it ends or nobody wants more; returns its bytes."""
        size, whole = 0, False
        try:
            with gevent.Timeout(self.options.request_timeout, TimeoutError):
                while record.failure is None:
                    piece = response.raw.read1()
                    if not piece:
                        whole = True
                        break
                    size += len(piece)
                    reader.feed(piece, time.perf_counter())
        except TimeoutError:
            record.fail(f"no end of the stream within {self.options.request_timeout:g} s")
        except (HTTPError, OSError):
            pass  # the reader says what was missing
        reader.finish(whole)
        return size

    def _heed(self, response: Any) -> None:
        after = response.headers.get("Retry-After", "")
        if self.options.retry_after and response.status_code in STATUS_OVERLOADED and after.isdigit():
            self._pause = float(after)

    def _show(self, record: Record) -> None:
        """The latencies as rows of their own; of what came between tokens the mean and the worst."""
        rows: dict[str, float | None] = {"e2e": record.e2e, "ttft": record.ttft}
        gaps = record.inter_token()
        if gaps.size:
            rows |= {"itl mean": float(gaps.mean()), "itl max": float(record.chunk_gaps().max())}
        for row, seconds in rows.items():
            if seconds is not None:
                self.environment.events.request.fire(
                    request_type="LLM",
                    name=f"{self.kind} {row}",
                    response_time=seconds * 1000,
                    response_length=record.output_tokens,
                    exception=None,
                    context={},
                )


class WholeBody:
    """The body of an answer that is not streamed."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.texts: list[str] = []
        self._body = b""

    def feed(self, body: bytes, now: float) -> None:
        self._body += body

    def finish(self, whole: bool) -> None:
        record = self.record
        if not whole:
            record.fail("answer cut before its end")
            return
        try:
            answer = json.loads(self._body)
            choice = answer["choices"][0]
            usage = answer.get("usage") or {}
            record.finish_reason = choice.get("finish_reason")
            self.texts.append(str(choice.get("text") or (choice.get("message") or {}).get("content") or ""))
            read_usage(usage, record)
        except (ValueError, LookupError, TypeError, AttributeError):
            record.fail(f"not an answer: {self._body[:80]!r}")
            return
        if record.finish_reason is None:
            record.fail("answer without a finish_reason")


def _cause(error: BaseException | None) -> str:
    """What was at the bottom of an exception of requests, in words that are the same each time."""
    while error is not None and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or type(error).__name__
