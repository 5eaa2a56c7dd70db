"""An engine with the facade of the real one and an output known in advance: no model, no threads.

A token is a byte. The output is the alphabet over and over, begun at a letter that the seed picks when the temperature
is not 0; a logit bias of 100 forces one token instead.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Mapping, Sequence

from server.generation import (
    BodyTooLarge,
    DeadlineExceeded,
    EngineStatus,
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    ModelCard,
    Output,
    OutputToken,
    Phase,
    QueueFull,
    QueueTimeout,
    Usage,
)
from server.reports import CacheSnapshot, GroupSnapshot
from server.step import TokenLogprobs

BOS, EOS = 256, 257


class ByteTokenizer:
    vocab_size = 258
    bos_token_id = BOS
    eos_token_id = EOS
    special_ids = frozenset({BOS, EOS})
    special_texts = ("<s>", "</s>")
    added_texts: tuple[str, ...] = ()  # none is found in a text: `encode` makes bytes of all of it
    spells = True
    trims_start = False
    longest_token = 1
    special_token_names: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}
    chat_templates: Mapping[str, str] = {
        "default": "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    }

    def __init__(self, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos
        self.named = {"<s>": BOS, "</s>": EOS}  # what `token_id` knows

    def definition(self) -> None:
        """Like a tokenizer in Python, it has none."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self.adds_bos and add_special_tokens) + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self.token_bytes(i).decode("latin-1") for i in ids]

    def token_id(self, token: str) -> int | None:
        return self.named.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else (b"<s>", b"</s>")[token_id - BOS]


def token_logprob(token_id: int, top: int, logprob: float = -0.5) -> TokenLogprobs:
    """The token itself is the likeliest; the next ids follow."""
    others = tuple(((token_id + k) % 256, logprob - k) for k in range(top))
    return TokenLogprobs(token_id, logprob, others)


class FakeStream:
    def __init__(self, engine: FakeEngine, request: GenerationRequest, tokens: list[int]) -> None:
        self.engine = engine
        self.request = request
        self.queue_seconds: float | None = None
        self.closed_by: str | None = None
        self.aborted: str | None = None
        self.failure: Exception | None = None
        self.expired = False
        self.over = False
        self._outputs = self._plan(tokens)
        self.sent = 0

    def _plan(self, tokens: list[int]) -> list[Output]:
        request = self.request
        cached, evicted = self.engine.cached_tokens, self._evicted
        scores = None
        if request.prompt_logprobs is not None:
            scored = [token_logprob(i, request.prompt_logprobs) for i in request.prompt_ids[1:]]
            scores = (None, *scored)
        prompt = len(request.prompt_ids)
        if not tokens:
            return [Output("", (), Usage(prompt, 0, cached, evicted), "length", None, scores)]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(i for i in request.prompt_ids if i < 256))  # it may end inside a character
        whole, pieces, matched, complete = "", [], None, False
        for index, token in enumerate(tokens):
            final = index == len(tokens) - 1
            pieces.append("" if token >= 256 else decoder.decode(bytes([token]), final))
            whole += pieces[-1]
            found = [(whole.find(stop), stop) for stop in request.stop if stop in whole]
            if found:
                at, matched = min(found)
                whole = whole[:at]
            complete = request.ending is not None and request.ending.feed(pieces[-1])
            if found or complete or token in request.params.stop_token_ids:
                break
        outputs: list[Output] = []
        end = 0
        for index, piece in enumerate(pieces):
            token = tokens[index]
            top = request.params.logprobs
            scored = None if top is None else token_logprob(token, top, self.engine.logprob(request))
            item = OutputToken(token, piece, scored)
            begin, end = end, end + len(piece)
            reason: str | None = None
            stop_reason: str | int | None = None
            if index == len(pieces) - 1:
                ended = token in request.params.stop_token_ids
                reason = "stop" if matched or complete or ended else "length"
                stop_reason = matched or (token if ended and token != EOS else None)
            usage = Usage(prompt, index + 1, cached, evicted)
            outputs.append(
                Output(whole[begin:end], (item,), usage, reason, stop_reason, scores if index == 0 else None)
            )
        return outputs

    @property
    def _evicted(self) -> int:
        return 0 if self.request.kv_budget is None else self.engine.evicted_tokens

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Output:
        if self.sent == len(self._outputs) or self.over:
            raise StopAsyncIteration
        while not (self.failure or self.aborted or self.expired or self.over or self.engine.gate.is_set()):
            await self._wait()
        if self.over:
            raise StopAsyncIteration
        if self.failure:
            self.end()
            raise self.failure
        usage = Usage(len(self.request.prompt_ids), self.sent, self.engine.cached_tokens, self._evicted)
        if self.aborted or self.expired:
            self.end()
            return Output("", (), usage, *(("abort",) if self.aborted else ("length", "deadline")))
        if (wait := self.engine.delay(self.request)) is not None:
            await wait
        if self.engine.step_seconds:
            await asyncio.sleep(self.engine.step_seconds)
        self.queue_seconds = 0.001
        output = self._outputs[self.sent]
        self.sent += 1
        if output.finish_reason:
            self.end()
        return output

    async def _wait(self) -> None:
        """Until something changes or the request's time, counted from here, is up."""
        limits = (self.request.timeout, None if self.sent else self.request.queue_timeout)
        seconds = min((limit for limit in limits if limit is not None), default=None)
        try:
            await asyncio.wait_for(self.engine.changed(), seconds)
        except TimeoutError:
            if self.sent:
                self.expired = True
            elif seconds == self.request.queue_timeout:
                self.failure = QueueTimeout("the request did not start in time", retry_after=7)
            else:
                self.failure = DeadlineExceeded("the request had no output in time")

    def close(self, cause: str = "disconnect") -> None:
        if not self.over and self.closed_by is None:
            self.closed_by = cause
            self.end()

    def end(self) -> None:
        self.over = True
        self.engine.open.pop(self.request.request_id, None)
        self.engine.wake()


class FakeEngine:
    """`gate` holds every token back while it is clear; `tokens` may replace the output of a request."""

    def __init__(self, *, names: tuple[str, ...] = ("tiny",), max_model_len: int = 64, max_open: int = 64) -> None:
        self.card = ModelCard(
            served_names=names,
            root="/models/tiny",
            revision=None,
            dtype="float32",
            vocab_size=ByteTokenizer.vocab_size,
            max_model_len=max_model_len,
            limited_by="--max-model-len",
            eos_token_ids=frozenset({EOS}),
            created=1_700_000_000,
        )
        self.bytes = ByteTokenizer()
        self.phase = Phase.READY
        self.loaded = True
        self.detail = ""
        self.max_open = max_open
        self.max_queued_tokens = 10**6
        self.waiting_tokens = 0
        self.kv_usage = 0.0
        self.stalled_seconds = 0.0
        self.cached_tokens = 0
        self.evicted_tokens = 0  # of each sequence that has a budget
        self.snapshot = CacheSnapshot(64, 16, 0, 0, 64, (GroupSnapshot(None, None),), (), ())
        self.step_seconds = 0.0
        self.tokens: Callable[[GenerationRequest], list[int]] | None = None
        self.logprob: Callable[[GenerationRequest], float] = lambda request: -0.5
        self.delay: Callable[[GenerationRequest], Awaitable[object] | None] = lambda request: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.open: dict[str, FakeStream] = {}
        self.streams: list[FakeStream] = []
        self.drained_with: float | None = None
        self.stopped = False
        self._changed = asyncio.Event()

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(
            self.phase,
            self.detail,
            running=len(self.open),
            waiting_tokens=self.waiting_tokens,
            kv_usage=self.kv_usage,
            max_num_seqs=4,
            max_queued_requests=self.max_open - 4,
            max_queued_tokens=self.max_queued_tokens,
            stalled_seconds=self.stalled_seconds,
        )

    @property
    def model(self) -> ModelCard | None:
        return self.card if self.loaded else None

    @property
    def tokenizer(self) -> ByteTokenizer | None:
        return self.bytes if self.loaded else None

    @property
    def requests(self) -> list[GenerationRequest]:
        return [stream.request for stream in self.streams]

    async def start(self) -> None:
        pass

    def check_room(self, more: int) -> None:
        if len(self.open) + more > self.max_open:
            raise QueueFull(f"{len(self.open)} requests are open", 7, "queue_full")

    def submit(self, requests: Sequence[GenerationRequest]) -> list[FakeStream]:
        if self.phase is not Phase.READY:
            raise EngineUnavailable("not ready", self.phase)
        self.check_room(len(requests))
        tokens = sum(len(request.prompt_ids) for request in requests if request.leader is None)
        if tokens > self.max_queued_tokens:
            raise BodyTooLarge(f"{tokens} prompt tokens, {self.max_queued_tokens} may wait")
        if self.waiting_tokens + tokens > self.max_queued_tokens:
            raise QueueFull(f"{self.waiting_tokens} tokens are waiting", 7, "queue_tokens")
        return [self._submit(request) for request in requests]

    def _submit(self, request: GenerationRequest) -> FakeStream:
        assert request.request_id not in self.open
        assert request.leader is None or request.leader in self.open
        stream = FakeStream(self, request, (self.tokens or _alphabet)(request)[: request.max_tokens])
        self.open[request.request_id] = stream
        self.streams.append(stream)
        self.wake()
        return stream

    async def cache_snapshot(self) -> CacheSnapshot:
        if self.phase in (Phase.LOADING, Phase.DEAD):
            raise EngineUnavailable(self.detail, self.phase)
        return self.snapshot

    async def drain(self, timeout: float) -> bool:
        self.phase = Phase.DRAINING
        self.drained_with = timeout
        try:
            await asyncio.wait_for(self._until_idle(), timeout)
        except TimeoutError:
            for stream in self.open.values():
                stream.aborted = "shutdown"
            self.wake()
            await self._until_idle()
            return False
        return True

    async def stop(self) -> None:
        self.stopped = True

    def fail(self, message: str) -> None:
        """What the death of the engine is to its callers."""
        self.phase, self.detail = Phase.DEAD, message
        for stream in self.open.values():
            stream.failure = GenerationFailed(message)
        self.wake()

    def release(self) -> None:
        self.gate.set()
        self.wake()

    def wake(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which requests that come or go may change, holds."""
        while not condition():
            await self.changed()

    async def _until_idle(self) -> None:
        while self.open:
            await self.changed()


def _alphabet(request: GenerationRequest) -> list[int]:
    forced = [i for i, bias in request.params.logit_bias.items() if bias == 100]
    if forced:
        return forced[:1] * request.max_tokens
    start = request.params.seed % 26 if request.params.temperature else 0
    return [97 + (start + i) % 26 for i in range(request.max_tokens)]
