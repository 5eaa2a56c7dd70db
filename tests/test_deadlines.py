"""Deadlines against a dictionary that is searched whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.deadlines import Deadlines

keys = st.sampled_from([f"r{i}" for i in range(8)])
moves = st.lists(
    st.tuples(st.just("set"), keys, st.integers(0, 40))
    | st.tuples(st.sampled_from(["drop", "wait"]), keys, st.just(0)),
    max_size=300,
)


@given(moves)
def test_the_same_as_looking_at_all_of_them(moves: list[tuple[str, str, int]]) -> None:
    deadlines = Deadlines()
    naive: dict[str, float] = {}
    now = 0.0
    for move, key, at in moves:
        if move == "set":
            deadlines.set(key, now + at)
            naive[key] = now + at
        elif move == "drop":
            deadlines.set(key, None)
            naive.pop(key, None)
        else:
            now += 3
            passed = deadlines.passed(now)
            assert sorted(passed) == sorted(key for key, at in naive.items() if at <= now)
            assert [naive[key] for key in passed] == sorted(naive[key] for key in passed)
            naive = {key: at for key, at in naive.items() if at > now}
        assert deadlines.next == min(naive.values(), default=None)


def test_far_deadlines_of_what_is_long_over_take_no_room() -> None:
    deadlines = Deadlines()
    for i in range(10_000):
        deadlines.set(f"r{i}", 86400.0 + i)
        deadlines.set(f"r{i}", None)
    assert len(deadlines._heap) < 100
