"""What a head keeps of a sequence, found token by token: an oracle for compactions."""

from __future__ import annotations

from collections.abc import Sequence

from server.step import Compaction


def kept_tokens(scores: Sequence[float], compaction: Compaction) -> list[int]:
    """One by one: the first, the last, and then whichever is left with the most."""
    length = compaction.length
    first = list(range(compaction.sinks))
    last = list(range(length - compaction.recent, length))
    others = [token for token in range(length) if token not in first and token not in last]
    chosen: list[int] = []
    while len(first) + len(last) + len(chosen) < compaction.keep:
        if compaction.policy == "window":
            best = max(others)
        else:
            best = others[0]
            for token in others:
                if scores[token] > scores[best]:
                    best = token
        others.remove(best)
        chosen.append(best)
    return sorted(first + last + chosen)
