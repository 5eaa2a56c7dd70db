"""docs/operating.md names every metric there is, with its kind, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from server.metrics import Metrics

PAGE = Path(__file__).parents[1] / "docs" / "operating.md"


def documented() -> dict[str, str]:
    """The kind of each metric in the table, by its full name."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    table = [(cells[0], cells[1].strip()) for cells in rows if len(cells) == 4]
    return {f"sluice_{name}": kind for names, kind in table for name in re.findall(r"`(\w+)`", names)}


def test_the_table_has_every_metric_and_its_kind() -> None:
    registry = CollectorRegistry()
    Metrics(registry, "tiny")
    exported = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in registry.collect()
        if family.name.startswith("sluice_")
    }
    assert documented() == exported
