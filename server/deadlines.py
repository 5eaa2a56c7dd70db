"""When open requests run out of time, without a timer for each."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class Deadlines:
    """At most one deadline for each key, a reading of a monotonic clock; the engine asks between steps.

    A heap whose stale entries are dropped when they come up, or all at once when they are the most.
    """

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, at: float | None) -> None:
        """Let `key` have the deadline `at` and no other; None for none."""
        if at is None:
            self._at.pop(key, None)
            return
        self._at[key] = at
        heappush(self._heap, (at, key))
        if len(self._heap) > 64 + 2 * len(self._at):
            self._heap = [(at, key) for key, at in self._at.items()]
            heapify(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest deadline there is."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> list[str]:
        """The keys whose deadline has come, earliest first; they have none from now on."""
        keys = []
        while (at := self.next) is not None and at <= now:
            key = heappop(self._heap)[1]
            del self._at[key]
            keys.append(key)
        return keys
