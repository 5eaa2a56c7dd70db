from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.stops import StopMatch, StopMatcher

words = st.text("AB🦜", min_size=1, max_size=5)


def _first_match(text: str, stops: list[str], after: int) -> StopMatch | None:
    """Brute force: the stop string that ends beyond `after`, first by start, then by length."""
    found = [
        (start, start + len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    if not found:
        return None
    start, end, stop = min(found)
    return StopMatch(stop, start, end)


def _longest_beginning(text: str, stops: list[str]) -> int:
    ends = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(ends, default=0)


@given(st.lists(words, max_size=4), st.lists(st.text("AB🦜", max_size=4), max_size=12), st.integers(0, 6))
def test_agrees_with_brute_force(stops: list[str], pieces: list[str], uncounted: int) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for i, piece in enumerate(pieces):
        before = len(text)
        text += piece
        match = matcher.feed(piece, counts=i >= uncounted)
        expected = _first_match(text, stops, before) if i >= uncounted else None
        assert match == expected
        if match is not None:
            return
        assert matcher.held == _longest_beginning(text, stops)


@given(st.lists(words, min_size=1, max_size=4), st.text("AB🦜", max_size=20))
def test_character_by_character_nothing_is_shown_of_a_match(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    for i, char in enumerate(text):
        shown_before = i - matcher.held
        match = matcher.feed(char)
        if match is not None:
            assert match.start >= shown_before
            assert text[match.start : match.end] == match.stop
            return


def test_the_earliest_start_wins_then_the_shortest() -> None:
    assert StopMatcher(["BC", "ABCD"]).feed("xABCDx") == StopMatch("ABCD", 1, 5)
    assert StopMatcher(["AAA", "AA"]).feed("AAA") == StopMatch("AA", 0, 2)


def test_a_match_may_begin_before_it_counts() -> None:
    matcher = StopMatcher(["AA"])
    assert matcher.feed("AA", counts=False) is None
    assert matcher.held == 1
    assert matcher.feed("A") == StopMatch("AA", 1, 3)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(["A", ""])


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything") is None
    assert matcher.held == 0
