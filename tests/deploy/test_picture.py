"""What the picture of a dashboard is made of. Whether it is a good one, only an eye can tell."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from loadtest.panels.dashboard import FOLDER, load
from loadtest.panels.picture import Answer, _places, _row_places, _table, _without_nan
from loadtest.panels.prometheus import Series

DASHBOARD = load(FOLDER / "sluice.json")


@pytest.mark.parametrize("rows", [(), ("SLO",), ("Tokens", "KV pool"), tuple(DASHBOARD.rows.values())])
def test_the_rows_chosen_follow_each_other_without_gap_or_overlap(rows: tuple[str, ...]) -> None:
    places, height = _places(DASHBOARD, rows)
    titles = [title for title, _ in _row_places(DASHBOARD, rows)]
    assert titles == [title for title in DASHBOARD.rows.values() if not rows or title in rows]
    cells = [
        {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        for at in places.values()
    ]
    cells += [{(x, y) for x in range(24)} for _, y in _row_places(DASHBOARD, rows)]
    assert all(not one & other for one, other in combinations(cells, 2))
    assert set().union(*cells) == {(x, y) for x in range(24) for y in range(height)}


def test_a_table_joins_its_answers_by_instance() -> None:
    panel = next(panel for panel in load(FOLDER / "sluice-replicas.json").panels if panel.title == "Instances")
    answers = [
        Answer(query, [Series({"instance": name}, [(0.0, number)]) for name, number in (("b", 2.0), ("a", 1.0))])
        for query in panel.queries
    ]
    table = _table(panel, answers)
    assert table["columns"][0] == {"name": "instance", "unit": "string"}
    assert [row[0] for row in table["rows"]] == ["a", "b"]
    assert [row[1] for row in table["rows"]] == [1.0, 2.0]
    assert table["columns"][1]["unit"] != "string"


def test_no_value_is_null() -> None:
    assert _without_nan({"a": [1.0, math.nan], "b": (math.inf, "x")}) == {"a": [1.0, None], "b": [None, "x"]}
