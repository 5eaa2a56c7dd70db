"""One open request inside the engine: its text so far, its times, and the outputs it owes its caller."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from server.generation import GenerationRequest, Output, OutputToken, Usage
from server.reports import AbortCause, FinishedReport
from server.scheduler.request import Request
from server.scheduler.scheduler import Progress
from server.step import TokenLogprobs
from server.text.stream import Delta, TextStream
from server.text.tokenizer import Tokenizer

DEADLINE = "deadline"


@dataclass(slots=True)
class Submission:
    """What the sequences submitted together have in common, so that time runs out for all of them or for none.

    arrived: when they were submitted.
    started, answered: whether one of them has been admitted, and has a token or an end.
    """

    arrived: float
    started: bool = False
    answered: bool = False


class Session:
    """Turns the scheduler's progress on a request into outputs. Touched by the engine's thread alone.

    All times are readings of one monotonic clock, in seconds; None for what has not happened.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sequence: Request,
        submission: Submission,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.submission = submission
        self.arrived = submission.arrived
        self.queue_deadline = None if queue_timeout is None else self.arrived + queue_timeout
        self.deadline = None if timeout is None else self.arrived + timeout
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.prompt_counted = False
        self._text: TextStream | None = None
        self._held: deque[tuple[int, TokenLogprobs | None]] = deque()  # tokens whose text is not certain yet
        self._num_released = 0
        self._scores: list[TokenLogprobs | None] = [None]  # the first prompt token follows nothing

    @property
    def num_held(self) -> int:
        """Tokens generated but not delivered."""
        return len(self._held)

    def advance(self, progress: Progress, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Output | None:
        """What a step made certain, or None when it is nothing yet.

        An output with a finish_reason is the last one; the caller then ends the request if the scheduler has not.

        Raises:
            ConstraintFailed: the request's grammar cannot be followed further.
        """
        self._scores.extend(progress.scores)
        if progress.token_id is None:
            return self._output(Delta("", 0, None), "length", None) if progress.finish_reason else None

        completes = self._completes(progress)
        finish_reason = "stop" if completes else progress.finish_reason
        text = self._text_stream(tokenizer)
        self._held.append((progress.token_id, progress.logprobs))
        ends_by_token = progress.finish_reason == "stop" or (completes and progress.token_id in eos_token_ids)
        if ends_by_token and not self.request.include_stop_str:
            stop_token = self._held.pop()
            delta = text.finish()
            if delta.stop is not None:
                return self._output(delta, "stop", delta.stop, stop_token)
            reason = None if progress.token_id in eos_token_ids else progress.token_id
            return self._output(delta, "stop", reason, stop_token)

        delta = text.append(progress.token_id)
        if delta.stop is not None:
            return self._output(delta, "stop", delta.stop)
        if self._is_complete(delta):
            finish_reason = "stop"
        if finish_reason is None:
            return self._output(delta, None, None) if delta.released or delta.text else None
        last = text.finish()
        joined = Delta(delta.text + last.text, delta.released + last.released, last.stop)
        if last.stop is not None:
            return self._output(joined, "stop", last.stop)
        ended_by_token = progress.finish_reason == "stop" and progress.token_id not in eos_token_ids
        return self._output(joined, finish_reason, progress.token_id if ended_by_token else None)

    def _completes(self, progress: Progress) -> bool:
        """Whether this token completes the text by the request's grammar, which goes on by it."""
        constraint = self.request.constraint
        if constraint is None or progress.token_id is None or progress.finish_reason == "stop":
            return False
        constraint.accept(progress.token_id)
        return constraint.finished

    def _is_complete(self, delta: Delta) -> bool:
        """Whether the text is all that was asked for."""
        ending, least = self.request.ending, self.request.params.min_tokens
        return ending is not None and ending.feed(delta.text) and self.sequence.num_outputs >= least

    def cut_off(self) -> Output:
        """The last output of a request that is aborted: text that was held back stays back."""
        return Output("", (), self.usage, "abort")

    def run_out(self) -> Output:
        """The last output of a request whose time is up: all the text it has."""
        delta = Delta("", 0, None) if self._text is None else self._text.finish()
        if delta.stop is not None:
            return self._output(delta, "stop", delta.stop)
        return self._output(delta, "length", DEADLINE)

    def report(self, finish_reason: str, cause: AbortCause | None, now: float) -> FinishedReport:
        """What the metrics are told of the request at its end."""
        usage = self.usage
        return FinishedReport(
            endpoint=self.request.endpoint,
            finish_reason=finish_reason,
            abort_cause=cause,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generation_tokens=usage.completion_tokens,
            queue_seconds=_between(self.arrived, self.admitted),
            prefill_seconds=_between(self.admitted, self.first_token),
            decode_seconds=_between(self.first_token, self.last_token),
            total_seconds=now - self.arrived,
        )

    @property
    def usage(self) -> Usage:
        return Usage(
            self.sequence.num_prompt, self.sequence.num_outputs, self.sequence.num_cached, self.sequence.num_evicted
        )

    def _text_stream(self, tokenizer: Tokenizer) -> TextStream:
        if self._text is None:
            self._text = TextStream(
                tokenizer,
                self.request.prompt_ids,
                stop=self.request.stop,
                include_stop_str=self.request.include_stop_str,
                skip_special_tokens=self.request.skip_special_tokens,
                shown_special_ids=self.request.shown_special_ids,
                min_tokens=self.request.params.min_tokens,
            )
        return self._text

    def _output(
        self,
        delta: Delta,
        finish_reason: str | None,
        stop_reason: str | int | None,
        textless: tuple[int, TokenLogprobs | None] | None = None,
    ) -> Output:
        """An output of `delta`'s text and the tokens it releases, and of `textless`, a stop token without text."""
        tokens = []
        for _ in range(delta.released):
            token_id, logprobs = self._held.popleft()
            assert self._text is not None
            tokens.append(OutputToken(token_id, self._text.pieces[self._num_released], logprobs))
            self._num_released += 1
        if textless is not None:
            tokens.append(OutputToken(textless[0], "", textless[1]))
        scores = None
        if self._scores and self.request.prompt_logprobs is not None:
            scores, self._scores = tuple(self._scores), []
        return Output(delta.text, tuple(tokens), self.usage, finish_reason, stop_reason, scores)


def _between(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else later - earlier
