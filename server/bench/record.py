"""What one request looked like from the client's side, and the latencies that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class Record:
    """One request. Times are seconds of the run's clock; None until they happen.

    intended: when the request was due. An open loop measures from here, however late the client really sent it, so that
        a stalled server cannot hide its queue by stalling the client (coordinated omission).
    arrivals: when each chunk with text was read; chunks that came in one read share a time.
    totals: the completion tokens the server reported with each of these chunks, None where it reported none.
    failure: why the request does not count, None while it is well. Nothing that failed is ever dropped.
    """

    intended: float
    sent: float | None = None
    ended: float | None = None
    arrivals: list[float] = field(default_factory=list)
    totals: list[int | None] = field(default_factory=list)
    status: int | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    failure: str | None = None

    def fail(self, why: str) -> None:
        """Mark the request failed; the first reason stands, as later ones usually follow from it."""
        if self.failure is None:
            self.failure = why

    @property
    def ttft(self) -> float | None:
        """Seconds from the intended arrival to the first text."""
        return self.arrivals[0] - self.intended if self.arrivals else None

    @property
    def e2e(self) -> float | None:
        """Seconds from the intended arrival to the end of the stream."""
        return None if self.ended is None else self.ended - self.intended

    @property
    def output_tokens(self) -> int:
        """Completion tokens by the server's usage; chunks of text where it sent none."""
        return len(self.arrivals) if self.completion_tokens is None else self.completion_tokens

    def chunk_gaps(self) -> FloatArray:
        """Seconds between consecutive chunks of text."""
        return np.diff(np.asarray(self.arrivals, dtype=np.float64))

    def inter_token(self) -> FloatArray:
        """Seconds between tokens, one sample for each token after the first chunk.

        A chunk may hold several tokens: the gap before it is shared evenly among them, so the samples always add up to
        the time between the first and the last chunk. How many it holds comes from the usage sent with the chunks;
        without that every chunk is taken to hold the same number, the total over the chunks (rounded to whole tokens).
        """
        gaps = self.chunk_gaps()
        counts = tokens_per_chunk(self.totals, self.output_tokens)[1:]
        return np.repeat(gaps / counts, counts)


def tokens_per_chunk(totals: Sequence[int | None], output_tokens: int) -> npt.NDArray[np.int64]:
    """Tokens in each chunk of text: at least 1, and `output_tokens` in all where that is possible.

    `totals` are the server's running totals; with one missing they say nothing reliable, and the tokens are spread
    evenly. A total reported twice (a chunk that finishes a character begun before) still gives each chunk one.
    """
    known = [total for total in totals if total is not None]
    if len(known) == len(totals):
        counts = np.diff(np.asarray([0, *known], dtype=np.int64))
    else:
        edges = np.linspace(0, output_tokens, len(totals) + 1).round().astype(np.int64)
        counts = np.diff(edges)
    return np.maximum(counts, 1)
