"""Which requests may be open at the same time: so many sequences, and so many prompt tokens that wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

from server.generation import BodyTooLarge, GenerationRequest, QueueFull

MAX_RETRY_AFTER_SECONDS = 60


class Admission:
    """The bounds of the queue and what is in it.

    `check` and `enter` are called on the callers' loop, the others on the engine's thread. A prompt counts once,
    however many siblings share it, and until its first sequence has started or is over.

    max_num_seqs: sequences of the batch; max_queued_requests, max_queued_tokens: what may wait beside it.
    """

    def __init__(self, max_num_seqs: int, max_queued_requests: int, max_queued_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self._entered = 0  # prompt tokens that ever came into the queue; each of the two has one writer
        self._left = 0
        self._mean_seconds = 1.0  # that requests run which come to their end

    @property
    def waiting_tokens(self) -> int:
        return self._entered - self._left

    def check_room(self, num_open: int, more: int) -> None:
        """Raises QueueFull if `more` sequences, of a token at least, may not join the `num_open` that there are."""
        most = self.max_num_seqs + self.max_queued_requests
        excess = num_open + more - most
        if excess > 0:
            raise QueueFull(
                f"{num_open} requests are open and {more} more would be {excess} too many: "
                f"--max-num-seqs and --max-queued-requests allow {most}.",
                self.retry_after(excess),
                "queue_full",
            )
        waiting = self.waiting_tokens  # once: the engine's thread takes away from it
        if waiting >= self.max_queued_tokens:
            raise self._too_many_tokens(waiting, more, num_open)

    def check(self, requests: Sequence[GenerationRequest], num_open: int, own_open: int | None = None) -> None:
        """Raises QueueFull or BodyTooLarge unless `requests` may join the `num_open` that there are.

        own_open: how many of them are the same tenant's, where tenants share the queue.
        """
        self.check_room(num_open, len(requests))
        if own_open:
            self._check_share(num_open, len(requests), own_open)
        tokens = sum(map(queued_tokens, requests))
        if tokens > self.max_queued_tokens:
            raise BodyTooLarge(
                f"The prompts of this request have {tokens} tokens together; "
                f"at most {self.max_queued_tokens} may wait (--max-queued-tokens). Send fewer at a time."
            )
        waiting = self.waiting_tokens
        if waiting + tokens > self.max_queued_tokens:
            raise self._too_many_tokens(waiting, tokens, num_open)

    def _check_share(self, num_open: int, more: int, own_open: int) -> None:
        """A tenant may have as many requests open as places are free: alone he fills half of them, and whoever comes
        finds room (the dynamic thresholds of Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998)."""
        free = self.max_num_seqs + self.max_queued_requests - num_open
        excess = own_open + more - free
        if excess > 0:
            raise QueueFull(
                f"{own_open} requests of this API key are open and {more} more would be {excess} too many for the "
                f"{free} places that are free: --scheduling-policy fair leaves room for other keys.",
                self.retry_after(excess / 2),
                "queue_full",
            )

    def _too_many_tokens(self, waiting: int, more: int, num_open: int) -> QueueFull:
        excess = waiting + more - self.max_queued_tokens
        return QueueFull(
            f"{waiting} prompt tokens are waiting and {more} more would be {excess} too many: "
            f"--max-queued-tokens allows {self.max_queued_tokens}.",
            self.retry_after(num_open * excess / waiting),
            "queue_tokens",
        )

    def enter(self, request: GenerationRequest) -> None:
        self._entered += queued_tokens(request)

    def leave(self, request: GenerationRequest) -> None:
        """To be called once for each request: when it starts, or ends without having started."""
        self._left += queued_tokens(request)

    def ran(self, seconds: float) -> None:
        """A request came to its end after it had run this long."""
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def retry_after(self, places: float) -> int:
        """Seconds until so many places are likely to be free: what the batch takes to finish as many requests."""
        seconds = self._mean_seconds * places / self.max_num_seqs
        return max(1, min(MAX_RETRY_AFTER_SECONDS, math.ceil(seconds)))


def queued_tokens(request: GenerationRequest) -> int:
    return len(request.prompt_ids) if request.leader is None else 0
