"""What the turns amount to: ratios with their spread, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.compare.turns import Side
from server.bench.report import Level, align, milliseconds

FAILURE_LINES = 6  # of a server's last words under the table; --json has all


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a level, None where there is none (or 0, where all came at once); `shown` writes it."""

    name: str
    of: Callable[[Level], float | None]
    shown: Callable[[float], str]


MEASURES = (
    Measure("tok/s out", lambda level: level.output_tokens_per_s or None, lambda value: f"{value:.1f}"),
    Measure("TTFT p50", lambda level: (level.ttft and level.ttft.p50) or None, milliseconds),
    Measure("ITL p50", lambda level: (level.inter_token and level.inter_token.p50) or None, milliseconds),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measure of one server over the turns: its median, and its ratio to Sluice's in each turn that both took."""

    median: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    def json(self) -> dict[str, Any]:
        spread = {"lowest": min(self.ratios), "highest": max(self.ratios)} if self.ratios else {}
        return {"median": self.median, "ratio": self.ratio, **spread, "ratios": self.ratios}


@dataclass(frozen=True, slots=True)
class Report:
    """sides: Sluice first. load: names of the loads. output_tokens: asked for in each request."""

    sides: Sequence[Side]
    loads: Sequence[str]
    output_tokens: int

    def figure(self, side: Side, load: int, measure: Measure) -> Figure | None:
        """None where the server was never measured under that load."""
        pairs = list(zip(_values(side, load, measure), _values(self.sides[0], load, measure), strict=True))
        values = [value for value, _ in pairs if value is not None]
        if not values:
            return None
        ratios = tuple(value / ours for value, ours in pairs if value is not None and ours is not None)
        return Figure(statistics.median(values), ratios)

    def table(self) -> str:
        parts = [part for load in range(len(self.loads)) for part in (self._load(load), "")]
        parts += [
            "Times in milliseconds; ITL is the time from token to token. tok/s and times are medians over the turns; "
            "x Sluice is the ratio to Sluice's figure in the same turn: median (lowest..highest).",
            "",
        ]
        parts += [line for side in self.sides for line in self._how(side)]
        return "\n".join(parts)

    def json(self) -> dict[str, Any]:
        return {"loads": list(self.loads), "servers": [self._side(side) for side in self.sides]}

    def _load(self, load: int) -> str:
        head = ["server"]
        for measure in MEASURES:
            head += [measure.name, "x Sluice"]
        rows = [[*head, "tokens/answer", "failed"]]
        for side in self.sides:
            row = [side.name]
            for measure in MEASURES:
                figure = self.figure(side, load, measure)
                row += ["-", "-"] if figure is None else [measure.shown(figure.median), _ratio(figure)]
            levels = [turn[load] for turn in side.turns if turn is not None]
            good = sum(level.requests - level.failures for level in levels)
            row.append(f"{sum(level.output_tokens for level in levels) / good:.1f}" if good else "-")
            row.append(f"{sum(level.failures for level in levels)} of {sum(level.requests for level in levels)}")
            rows.append(row)
        turns = len(self.sides[0].turns)
        return f"{self.loads[load]}, {turns} turn{'s' * (turns > 1)} of each\n{align(rows)}"

    def _how(self, side: Side) -> list[str]:
        lines = [side.name]
        if side.peer is not None:
            peer = side.peer
            lines += [
                f"version {side.version}; {peer.numbers}; threads: {peer.threads}; most together: {peer.batch}; "
                f"prefix cache: {peer.prefix_cache}",
                peer.shown_command(),
            ]
            if peer.note:
                lines.append(peer.note)
        lines += self._notes(side)
        if side.failure:
            words = side.failure.strip().split("\n")
            lines += ["FAILED, " + words[0], *words[1:][-FAILURE_LINES:]]
        return [lines[0], *(f"  {line}" for line in lines[1:])]

    def _notes(self, side: Side) -> list[str]:
        levels = [level for turn in side.turns for level in turn or ()]
        notes = [f"takes no {', '.join(side.refused)}, so this was measured without"] if side.refused else []
        good = sum(level.requests - level.failures for level in levels)
        tokens = sum(level.output_tokens for level in levels)
        if good and tokens < good * self.output_tokens:
            notes.append(
                f"answers are shorter than the {self.output_tokens} tokens asked for, {tokens / good:.1f} on average: "
                "compare its figures per token, not per request"
            )
        cached, asked = (sum(getattr(level, name) for level in levels) for name in ("cached_tokens", "input_tokens"))
        if cached:
            notes.append(f"{cached / asked:.0%} of the input came from its prefix cache")
        if uncounted := sum(level.uncounted for level in levels):
            notes.append(f"{uncounted} answers without usage: their chunks are counted as tokens")
        kinds: dict[str, int] = {}
        for level in levels:
            for kind, count in level.failure_kinds.items():
                kinds[kind] = kinds.get(kind, 0) + count
        return notes + [f"{count} requests failed: {kind}" for kind, count in kinds.items()]

    def _side(self, side: Side) -> dict[str, Any]:
        figures = []
        for load, name in enumerate(self.loads):
            found = {measure.name: self.figure(side, load, measure) for measure in MEASURES}
            figures.append({"load": name} | {key: figure and figure.json() for key, figure in found.items()})
        return {
            "name": side.name,
            "version": side.version,
            "peer": None if side.peer is None else asdict(side.peer),
            "refused": side.refused,
            "failure": side.failure,
            "summary": figures,
            "turns": [turn and [level.json() for level in turn] for turn in side.turns],
        }


def _values(side: Side, load: int, measure: Measure) -> list[float | None]:
    """The measure in each turn."""
    return [None if turn is None else measure.of(turn[load]) for turn in side.turns]


def _ratio(figure: Figure) -> str:
    if figure.ratio is None:
        return "-"
    return f"{figure.ratio:.3f} ({min(figure.ratios):.3f}..{max(figure.ratios):.3f})"
