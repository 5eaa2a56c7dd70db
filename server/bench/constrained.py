"""Throughput with every second request constrained by a JSON schema, beside that without any."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from server.bench.report import Level, align

# Strings, numbers, enumerations and nesting; so many records that the text is longer than any that is asked for, so
# that both sides generate as many tokens.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1, "maximum": 99999},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["book", "film", "song"]},
            "score": {"type": "number", "minimum": 0, "maximum": 10},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "origin": {"anyOf": [{"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, {"type": "null"}]},
        },
        "required": ["id", "name", "kind", "score", "tags", "origin"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class ConstrainedComparison:
    """Loads with `half` of the requests constrained and with all of them `free`: for each load of the command line, one
    level of each turn."""

    half: tuple[tuple[Level, ...], ...]
    free: tuple[tuple[Level, ...], ...]

    def rows(self) -> list[dict[str, Any]]:
        """For each load: the median over the turns of the output tokens a second on both sides, and their ratio."""
        rows = []
        for half, free in zip(self.half, self.free, strict=True):
            ours, theirs = (statistics.median(level.output_tokens_per_s for level in levels) for levels in (half, free))
            rows.append({"load": half[0].load, "half": ours, "free": theirs, "ratio": ours / theirs})
        return rows

    def json(self) -> dict[str, Any]:
        levels = {"half": [[level.json() for level in levels] for levels in self.half]}
        levels["free"] = [[level.json() for level in levels] for levels in self.free]
        return {"schema": SCHEMA, "summary": self.rows(), "levels": levels}

    def table(self) -> str:
        head = ["load", "half constrained (tokens/s)", "free (tokens/s)", "half / free"]
        rows = [[row["load"], f"{row['half']:.1f}", f"{row['free']:.1f}", f"{row['ratio']:.3f}"] for row in self.rows()]
        return "Every second request constrained by a JSON schema\n" + align([head, *rows])
