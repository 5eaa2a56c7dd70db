"""POST /v1/completions."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.body import parse_object, read_body
from server.api.errors import invalid
from server.api.exchange import exchange_of
from server.api.generation import Generation, counting_refusal
from server.api.logprobs import LogprobsWriter
from server.api.parameters import COMPLETIONS, IGNORED_HEADER, check_unhandled, ignored_header
from server.api.prompts import TokenizedPrompt, tokenize
from server.api.sampling import output_cap, sampling_params, sibling
from server.api.sequences import sequences
from server.api.service import Service, served_name, service_of
from server.api.sse import DONE, EventStream, event
from server.api.watch import DisconnectWatch
from server.api.wire import ChoiceBody, CompletionBody, CompletionRequest, LogprobsBody, parse, request_schema
from server.generation import GenerationRequest, Output

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

router = APIRouter(tags=["completions"])

ENDPOINT = "completions"
DEFAULT_MAX_TOKENS = 16
# A larger body is parsed and checked in a worker, so that it does not delay other requests' tokens.
_LARGE_BODY = 64 * 1024
# An answer with more log-probabilities than this takes tens of milliseconds to write, which a worker then does.
_MANY_SCORES = 10_000


@router.post(
    "/v1/completions",
    response_model=CompletionBody,
    openapi_extra={"requestBody": request_schema(CompletionRequest)},
)
async def create_completion(request: Request) -> Response:
    """Continue each prompt `n` times; streamed as server-sent events or whole."""
    service, exchange = service_of(request), exchange_of(request)
    with counting_refusal(service, ENDPOINT, False):
        service.ready_model()
        data = await read_body(request)
        large = len(data) > _LARGE_BODY
        raw = await service.in_large_worker(parse_object, data) if large else parse_object(data)
    watch = DisconnectWatch(request.receive)
    try:
        with counting_refusal(service, ENDPOINT, raw.get("stream") is True):
            job = await watch.guard(_prepare(service, exchange.request_id, raw, large))
        generation = Generation(service, exchange, job.requests, job.n)
    except BaseException:
        watch.close()
        raise
    writer = CompletionWriter(job, generation)
    if job.body.stream:
        return EventStream(writer.events(), generation.close, watch, exchange, service.keep_alive, job.headers)
    try:
        answer = await watch.guard(writer.whole())
    finally:
        generation.close()
        watch.close()
    is_long = writer.num_scores > _MANY_SCORES
    body = await service.in_large_worker(_dump, answer) if is_long else _dump(answer)
    return Response(body, 200, job.headers, "application/json")


def _dump(answer: CompletionBody) -> bytes:
    return json.dumps(answer).encode()


@dataclass(frozen=True, slots=True)
class Job:
    """A body that has passed every check, and what became of it."""

    body: CompletionRequest
    id: str
    model_name: str
    tokenizer: Tokenizer
    prompts: list[TokenizedPrompt]
    requests: list[GenerationRequest]
    headers: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def n(self) -> int:
        return self.body.n or 1


def _check(raw: Mapping[str, Any]) -> tuple[list[str], CompletionRequest]:
    """The fields nobody knows, and the checked body. Raises APIError."""
    return check_unhandled(raw, CompletionRequest.model_fields.keys(), COMPLETIONS), parse(CompletionRequest, raw)


async def _prepare(service: Service, request_id: str, raw: Mapping[str, Any], large: bool) -> Job:
    """Everything that can be refused is refused here. Raises APIError."""
    worker = service.in_large_worker if large else service.in_worker
    unknown, body = await worker(_check, raw) if large else _check(raw)
    model, tokenizer = service.ready_model()
    name = served_name(body.model, model)
    n = body.n or 1
    most = service.settings.max_queued_requests
    if len(body.prompt) * n > most:
        raise invalid(
            "prompt" if n == 1 else "n",
            f"{len(body.prompt)} prompts with n = {n} make {len(body.prompt) * n} sequences; "
            f"one request may have up to {most} (--max-queued-requests).",
        )
    if body.stream_options and not body.stream:
        raise invalid("stream_options", "'stream_options' is allowed only with 'stream': true.")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' must be at most 'max_tokens', {max_tokens}; got {body.min_tokens}.")
    params = sampling_params(body, model, body.logprobs)
    prompts = await worker(
        tokenize,
        body.prompt,
        tokenizer,
        model,
        add_special_tokens=body.add_special_tokens is not False,
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=bool(body.echo),
        continued=max_tokens > 0,
    )
    caps = [output_cap(max_tokens, len(prompt.ids), model) for prompt in prompts]
    prefix = f"{request_id}/{service.fresh_serial()}"
    requests: list[GenerationRequest] = []
    for prompt, cap in zip(prompts, caps, strict=True):
        seed = service.fresh_seed() if body.seed is None else body.seed
        requests += sequences(
            body,
            prompt.ids,
            [sibling(params, seed, i) for i in range(n)],
            cap,
            prefix=prefix,
            first=len(requests),
            endpoint=ENDPOINT,
            streaming=bool(body.stream),
            prompt_logprobs=body.logprobs if body.echo else None,
        )
    headers = {IGNORED_HEADER: ignored_header(unknown)} if unknown else {}
    return Job(body, f"cmpl-{request_id}", name, tokenizer, prompts, requests, headers)


class CompletionWriter:
    """Writes the outputs of a generation as one body or as events."""

    def __init__(self, job: Job, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        choices = range(len(job.requests))
        self._logprobs = [LogprobsWriter(job.tokenizer) for _ in choices] if job.body.logprobs is not None else []
        self._to_echo = set(choices) if job.body.echo else set()

    @property
    def num_scores(self) -> int:
        """Log-probabilities in the whole answer, at most."""
        body = self._job.body
        if body.logprobs is None:
            return 0
        tokens = sum(request.max_tokens for request in self._job.requests)
        if body.echo:
            tokens += sum(len(request.prompt_ids) for request in self._job.requests)
        return tokens * (1 + body.logprobs)

    async def whole(self) -> CompletionBody:
        job = self._job
        texts: list[list[str]] = [[] for _ in job.requests]
        last: dict[int, Output] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for choice, output in outputs:
                texts[choice].append(self._take(choice, output))
                last[choice] = output
        choices: list[ChoiceBody] = [
            {
                "index": choice,
                "text": "".join(pieces),
                "logprobs": self._logprobs[choice].flush() if self._logprobs else None,
                "finish_reason": last[choice].finish_reason,
                "stop_reason": last[choice].stop_reason,
            }
            for choice, pieces in enumerate(texts)
        ]
        return {
            "id": job.id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model_name,
            "choices": choices,
            "usage": self._generation.usage(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Each chunk is put together from prepared text: this runs once a token for every stream there is."""
        job = self._job
        options = job.body.stream_options
        asked = bool(options and options.include_usage)
        always = bool(options and options.continuous_usage_stats)
        head = (
            f'{{"id":{quote(job.id)},"object":"text_completion","created":{job.created},'
            f'"model":{quote(job.model_name)},"choices":['
        )
        tail = '],"usage":null}' if asked else "]}"
        async with aclosing(self._generation.outputs()) as outputs:
            async for choice, output in outputs:
                text = self._take(choice, output)
                logprobs = self._logprobs[choice].flush() if self._logprobs else None
                if not (text or output.finish_reason or (logprobs and logprobs["tokens"])):
                    continue  # all of it is still held back
                if always:
                    tail = f'],"usage":{json.dumps(self._generation.usage())}}}'
                yield event(f"{head}{_chunk_choice(choice, text, logprobs, output)}{tail}".encode())
        if asked:
            yield event(f'{head}],"usage":{json.dumps(self._generation.usage())}}}'.encode())
        yield DONE

    def _take(self, choice: int, output: Output) -> str:
        """The text an output adds, with the echoed prompt before the first; its log-probabilities are collected."""
        pieces: Sequence[str] = ()
        if choice in self._to_echo:
            self._to_echo.remove(choice)
            pieces = self._job.prompts[choice // self._job.n].pieces or ()
        if self._logprobs:
            writer = self._logprobs[choice]
            if pieces:
                for piece, logprobs in zip(pieces, output.prompt_logprobs or (), strict=True):
                    writer.add(piece, logprobs)
            for token in output.tokens:
                writer.add(token.text, token.logprobs)
        return "".join(pieces) + output.text if pieces else output.text


def _chunk_choice(choice: int, text: str, logprobs: LogprobsBody | None, output: Output) -> str:
    """One entry of `choices` as JSON. ASCII only: some clients take U+2028 and its like for the end of a line."""
    scores = "null" if logprobs is None else json.dumps(logprobs)
    body = f'{{"index":{choice},"text":{quote(text)},"logprobs":{scores}'
    if output.finish_reason is None:
        return body + ',"finish_reason":null}'
    reason, stop = quote(output.finish_reason), json.dumps(output.stop_reason)
    return f'{body},"finish_reason":{reason},"stop_reason":{stop}}}'
