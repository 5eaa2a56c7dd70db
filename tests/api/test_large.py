"""Large answers are the same JSON, written without stopping the event loop."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.api.large import dump

LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUE = st.recursive(LEAF, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@given(VALUE)
def test_it_is_what_json_writes(value: Any) -> None:
    assert dump(value) == json.dumps(value)


def test_long_lists_and_deep_values_too() -> None:
    deep: Any = "x"
    for _ in range(20):
        deep = {"a": [deep, 1], "b": []}
    for value in (
        list(range(1000)),
        [[1, 2]] * 600,
        {"tokens": ["a"] * 513, "top": [{"a": -0.5, "b": None}] * 513},
        deep,
    ):
        assert dump(value) == json.dumps(value)
    assert dump((1, (2, 3))) == "[1, [2, 3]]"
