"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found at characters `start:end` of the whole text."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Matches a growing text against stop strings with the automaton of Knuth, Morris and Pratt (1977).

    The automaton's state is the length of the longest suffix of the text that is a beginning of the stop string, which
    is exactly what must not be shown yet; no text has to be kept or searched again.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must have at least one character")
        self._automata = [_Automaton(stop) for stop in stops]
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._length = 0

    @property
    def held(self) -> int:
        """How many of the last characters may still become part of a stop string."""
        return max((automaton.state for automaton in self._automata), default=0)

    def feed(self, text: str, counts: bool = True) -> StopMatch | None:
        """Take the next piece of the text; the stop string that ends in it, if any does.

        Of several the one that starts first is meant, and of those the shortest. With `counts` false a stop string that
        ends in this piece is passed over; one that merely begins in it may still match later.
        """
        offset = self._length
        self._length += len(text)
        if self._beginnings.isdisjoint(text) and not self.held:
            return None
        found: StopMatch | None = None
        for automaton in self._automata:
            end = automaton.feed(text, counts)
            if end is not None:
                stop = automaton.stop
                match = StopMatch(stop, offset + end - len(stop), offset + end)
                if found is None or (match.start, match.end) < (found.start, found.end):
                    found = match
        return found


class _Automaton:
    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallbacks = [0] * len(stop)  # [i]: longest proper beginning of stop[:i + 1] that is also its end
        for i in range(1, len(stop)):
            state = self._fallbacks[i - 1]
            while state and stop[state] != stop[i]:
                state = self._fallbacks[state - 1]
            self._fallbacks[i] = state + (stop[state] == stop[i])

    def feed(self, text: str, counts: bool) -> int | None:
        """How far into `text` the stop string ends, or None."""
        stop, state, fallbacks = self.stop, self.state, self._fallbacks
        for i, char in enumerate(text):
            while state and stop[state] != char:
                state = fallbacks[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if counts:
                    return i + 1
                state = fallbacks[state - 1]
        self.state = state
        return None
