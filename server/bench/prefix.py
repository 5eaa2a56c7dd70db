"""The same prompts behind one shared prefix, with the server's prefix cache on and off."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from server.bench.report import Level, align


@dataclass(frozen=True, slots=True)
class PrefixComparison:
    """Loads with the cache `on` and `off`: for each load of the command line, one level of each turn."""

    prefix_tokens: int
    on: tuple[tuple[Level, ...], ...]
    off: tuple[tuple[Level, ...], ...]

    def rows(self) -> list[dict[str, Any]]:
        """For each load: the median over the turns of the TTFT's median on both sides, in seconds, and their ratio."""
        rows = []
        for on, off in zip(self.on, self.off, strict=True):
            ours, theirs = (statistics.median(_ttft(level) for level in levels) for levels in (on, off))
            cached = sum(level.cached_tokens for level in on) / sum(level.input_tokens for level in on)
            row = {"load": on[0].load, "ttft_on": ours, "ttft_off": theirs, "ratio": ours / theirs}
            rows.append(row | {"cached_share": cached})
        return rows

    def json(self) -> dict[str, Any]:
        levels = {"on": [[level.json() for level in levels] for levels in self.on]}
        levels["off"] = [[level.json() for level in levels] for levels in self.off]
        return {"prefix_tokens": self.prefix_tokens, "summary": self.rows(), "levels": levels}

    def table(self) -> str:
        head = ["load", "TTFT p50 on (ms)", "TTFT p50 off (ms)", "on / off", "input cached"]
        rows = [
            [
                row["load"],
                f"{row['ttft_on'] * 1000:.1f}",
                f"{row['ttft_off'] * 1000:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['cached_share']:.0%}",
            ]
            for row in self.rows()
        ]
        return f"Prefix cache on and off, {self.prefix_tokens} tokens shared by all prompts\n" + align([head, *rows])


def _ttft(level: Level) -> float:
    assert level.ttft is not None, "a level in which nothing was answered has no place in a comparison"
    return level.ttft.p50
