"""The reply as it comes: what the engine's outputs add to its reasoning, its content and its tool calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from server.api.chat.job import ChatJob
from server.api.chat.scores import score
from server.api.chat.wire import ChatUsageBody, ScoreBody
from server.api.generation import Generation
from server.generation import Output
from server.text.reply import Part, Reasoning, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from server.text.reply import ReplyParser

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What an output adds to a choice, never nothing.

    parts: in order; every ToolCallStart has an id.
    scores: of the tokens since the last delta, [] unless log-probabilities were asked for. Tokens whose text is held
        back come with the next delta, so that the joined scores are those of all tokens.
    finish_reason: None until the choice's last delta.
    stop_reason: the stop string or token id that ended it, None for the model's own end.
    """

    choice: int
    parts: tuple[Part, ...]
    scores: Sequence[ScoreBody] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatReply:
    """All choices of a chat, side by side."""

    def __init__(self, job: ChatJob, generation: Generation) -> None:
        self._generation = generation
        self._choices = [_Choice(job, index) for index in range(len(job.requests))]

    async def deltas(self) -> AsyncGenerator[ChatDelta, None]:
        """Raises APIError as `Generation.outputs` does."""
        choices = self._choices
        async with aclosing(self._generation.outputs()) as outputs:
            async for index, output in outputs:
                delta = choices[index].take(output)
                if delta is not None:
                    yield delta

    def usage(self) -> ChatUsageBody:
        """Counts so far."""
        usage = self._generation.usage()
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": reasoning}}


class _Choice:
    """One choice's parser, and what has been seen of it.

    reasoning_tokens: tokens up to the first part that is no reasoning, if there was any reasoning before it.
    """

    def __init__(self, job: ChatJob, index: int) -> None:
        self._job = job
        self._index = index
        self._parser: ReplyParser = job.parser()
        self._scores: list[ScoreBody] = []
        self._arguments: list[list[str]] = []  # of each call begun
        self._surplus = False  # whether anything has followed the last call that the reply may have
        # Characters fed to the parser and characters of the released tokens: they tell where a token's text ends.
        self._num_fed = 0
        self._num_released = 0
        self._thinking: bool | None = None  # None until the first part; False for good once there is another part
        self._unknown_tokens = 0
        self.reasoning_tokens = 0

    def take(self, output: Output) -> ChatDelta | None:
        parts = self._parser.feed(output.text) if self._thinking is False else self._feed_counting(output)
        if self._job.body.logprobs:
            self._score(output)
        if output.finish_reason is None:
            if not parts:
                return None
            shown = self._keep(parts)
            if not shown:
                return None
            return ChatDelta(self._index, shown, self._flush())
        shown = self._keep([*parts, *self._parser.finish()])
        return ChatDelta(self._index, shown, self._flush(), self._finish_reason(output), output.stop_reason)

    def _feed_counting(self, output: Output) -> list[Part]:
        """Feeds the text token by token, so that the count does not depend on how many tokens came at once."""
        parts: list[Part] = []
        start = self._num_fed
        for token in output.tokens:
            self._num_released += len(token.text)
            if self._num_released > self._num_fed:
                parts += self._feed(output.text[self._num_fed - start : self._num_released - start])
            if self._thinking:
                self.reasoning_tokens += 1
            elif self._thinking is None:
                self._unknown_tokens += 1
        if self._num_fed - start < len(output.text):
            parts += self._feed(output.text[self._num_fed - start :])
        return parts

    def _feed(self, text: str) -> list[Part]:
        self._num_fed += len(text)
        parts = self._parser.feed(text)
        if parts and self._thinking is None and isinstance(parts[0], Reasoning):
            self._thinking = True
            self.reasoning_tokens = self._unknown_tokens
        if any(not isinstance(part, Reasoning) for part in parts):
            self._thinking = False
        return parts

    def _keep(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """The parts to show, with the calls' ids, and with their arguments noted.

        Nothing follows the last call that there may be. The engine ends with it; its token may hold more text.
        """
        if self._surplus:
            return ()
        kept: list[Part] = []
        for part in parts:
            match part:
                case ToolCallArguments(index, text):
                    self._arguments[index].append(text)
                    kept.append(part)
                case _ if len(self._arguments) >= self._job.max_calls:
                    self._surplus = True
                    break
                case ToolCallStart(index, name, call_id):
                    self._arguments.append([])
                    kept.append(ToolCallStart(index, name, call_id or self._call_id(index)))
                case Reasoning() if self._job.body.include_reasoning is False:
                    continue
                case _:
                    kept.append(part)
        return tuple(kept)

    def _call_id(self, index: int) -> str:
        """The same streamed and not. Clients tell the calls of a conversation apart by their ids, but may send all of
        its turns under one id of the request; so the prompt counts too.
        """
        name = f"{self._job.request_id}/{self._index}/{index}/{self._job.prompt_text}"
        return f"call_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"

    def _score(self, output: Output) -> None:
        job = self._job
        ends_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        for index, token in enumerate(output.tokens):
            ends = ends_by_token and index == len(output.tokens) - 1
            hidden = not token.text and (ends or token.token_id in job.hidden_ids)
            self._scores.append(score(token, job.tokenizer, hidden))

    def _flush(self) -> Sequence[ScoreBody]:
        scores, self._scores = self._scores, []
        return scores

    def _finish_reason(self, output: Output) -> FinishReason:
        """Calls that a limit or a stop string cut are no calls to act upon."""
        if output.finish_reason == "length" and not self._surplus:
            return "length"
        complete = self._arguments and all(_is_object("".join(pieces)) for pieces in self._arguments)
        return "tool_calls" if complete else "stop"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
