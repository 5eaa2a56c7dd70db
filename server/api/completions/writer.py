"""Writes the outputs of a completion as one body or as events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quote

from server.api.completions.job import Job
from server.api.errors import APIError
from server.api.generation import Generation
from server.api.large import dump
from server.api.logprobs import LogprobsWriter
from server.api.sse import DONE, error_event, event
from server.api.wire import ChoiceBody, CompletionBody, LogprobsBody
from server.generation import Output
from server.step import TokenLogprobs

Scores = tuple[TokenLogprobs | None, ...]

# The scores of a longer prompt are named and written in a thread: all others would wait for them.
_MANY_TOKENS = 256


class CompletionWriter:
    """Either `whole` or `events`, once."""

    def __init__(self, job: Job, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        body = job.body
        sequences = range(len(job.requests))
        as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = [LogprobsWriter(job.tokenizer, as_ids) for _ in sequences] if body.logprobs is not None else []
        self._to_echo = set(sequences) if body.echo else set()
        self._scores: dict[int, Scores | None] = {}  # of each prompt, once its first sequence has brought them

    @property
    def num_numbers(self) -> int:
        """Log-probabilities and token ids in the whole answer, at most."""
        body = self._job.body
        scores = 0 if body.logprobs is None else 1 + body.logprobs
        outputs = sum(request.max_tokens for request in self._job.requests)
        prompts = sum(len(request.prompt_ids) for request in self._job.requests)
        ids = outputs + prompts if body.return_token_ids else 0
        return ids + scores * (outputs + prompts if body.echo else outputs)

    async def whole(self) -> CompletionBody:
        job = self._job
        texts: list[list[str]] = [[] for _ in job.requests]
        ids: list[list[int]] = [[] for _ in job.requests]
        logprobs = [0.0 for _ in job.requests]
        last: dict[int, Output] = {}
        async with aclosing(self._outputs()) as outputs:
            async for sequence, output in outputs:
                texts[sequence].append(await self._take(sequence, output))
                ids[sequence] += [token.token_id for token in output.tokens]
                logprobs[sequence] += sum(token.logprobs.logprob for token in output.tokens if token.logprobs)
                last[sequence] = output
        choices: list[ChoiceBody] = []
        for first in range(0, len(job.requests), job.width):
            shown = list(range(first, first + job.width))
            if job.width > job.n:
                means = {sequence: logprobs[sequence] / max(1, len(ids[sequence])) for sequence in shown}
                shown = sorted(shown, key=means.__getitem__, reverse=True)[: job.n]  # equal ones in their order
            for sequence in shown:
                choice: ChoiceBody = {
                    "index": len(choices),
                    "text": "".join(texts[sequence]),
                    "logprobs": self._logprobs[sequence].flush() if self._logprobs else None,
                    "finish_reason": last[sequence].finish_reason,
                    "stop_reason": last[sequence].stop_reason,
                }
                if job.body.return_token_ids:
                    choice["prompt_token_ids"] = list(job.requests[sequence].prompt_ids)
                    choice["token_ids"] = ids[sequence]
                choices.append(choice)
        return {
            "id": job.id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model_name,
            "choices": choices,
            "usage": self._generation.usage(),
        }

    def failure(self, error: APIError) -> bytes:
        return error_event(error)

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
        # The ids of each prompt stand in the first chunk of each of its choices.
        to_show = set(range(len(job.requests))) if job.body.return_token_ids else set()
        async with aclosing(self._outputs()) as outputs:
            async for choice, output in outputs:
                text = await self._take(choice, output)
                logprobs = self._logprobs[choice].flush() if self._logprobs else None
                with_ids = job.body.return_token_ids and output.tokens
                if not (text or output.finish_reason or (logprobs and logprobs["tokens"]) or with_ids):
                    continue  # all of it is still held back
                if always:
                    tail = f'],"usage":{json.dumps(self._generation.usage())}}}'
                extra = ""
                if job.body.return_token_ids:
                    extra = f',"token_ids":{json.dumps([token.token_id for token in output.tokens])}'
                    if choice in to_show:
                        to_show.remove(choice)
                        extra += f',"prompt_token_ids":{json.dumps(job.requests[choice].prompt_ids)}'
                scores = "null" if logprobs is None else await _written(logprobs)
                yield event(f"{head}{_chunk_choice(choice, text, scores, output, extra)}{tail}".encode())
        if asked:
            yield event(f'{head}],"usage":{json.dumps(self._generation.usage())}}}'.encode())
        yield DONE

    async def _outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """(sequence, output) pairs; where prompts are scored, those of a prompt wait for the scores.

        The first sequence of a prompt brings them with its first output, for its siblings too.
        """
        async with aclosing(self._generation.outputs()) as outputs:
            if not (self._job.body.echo and self._logprobs):
                async for pair in outputs:
                    yield pair
                return
            waiting: dict[int, list[tuple[int, Output]]] = {}
            async for sequence, output in outputs:
                prompt, sibling = divmod(sequence, self._job.width)
                if prompt in self._scores:
                    yield sequence, output
                elif sibling:
                    waiting.setdefault(prompt, []).append((sequence, output))
                else:
                    self._scores[prompt] = output.prompt_logprobs
                    yield sequence, output
                    for pair in waiting.pop(prompt, ()):
                        yield pair

    async def _take(self, sequence: int, output: Output) -> str:
        """The text an output adds, with the echoed prompt before the first; its log-probabilities are collected."""
        text = output.text
        if sequence in self._to_echo:
            self._to_echo.remove(sequence)
            pieces = self._job.prompts[sequence // self._job.width].pieces or ()
            text = "".join(pieces) + text
            if self._logprobs and len(pieces) > _MANY_TOKENS:
                await asyncio.to_thread(self._score_prompt, sequence, pieces)
            elif self._logprobs:
                self._score_prompt(sequence, pieces)
        if self._logprobs:
            for token in output.tokens:
                self._logprobs[sequence].add(token.token_id, token.text, token.logprobs)
        return text

    def _score_prompt(self, sequence: int, pieces: Sequence[str]) -> None:
        ids, scores = self._job.requests[sequence].prompt_ids, self._scores[sequence // self._job.width] or ()
        for token_id, piece, logprobs in zip(ids, pieces, scores, strict=True):
            self._logprobs[sequence].add(token_id, piece, logprobs)


async def _written(logprobs: LogprobsBody) -> str:
    if len(logprobs["tokens"]) > _MANY_TOKENS:
        return await asyncio.to_thread(dump, logprobs)
    return json.dumps(logprobs)


def _chunk_choice(choice: int, text: str, scores: str, output: Output, extra: str) -> str:
    """One entry of `choices` as JSON. ASCII only: some clients take U+2028 and its like for the end of a line."""
    body = f'{{"index":{choice},"text":{quote(text)},"logprobs":{scores}{extra}'
    if output.finish_reason is None:
        return body + ',"finish_reason":null}'
    reason, stop = quote(output.finish_reason), json.dumps(output.stop_reason)
    return f'{body},"finish_reason":{reason},"stop_reason":{stop}}}'
