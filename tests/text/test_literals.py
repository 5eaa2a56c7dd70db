"""Finding the tokens that a client has written: the longest at each place, in time that grows with the text alone."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from server.text.literals import any_of

TEXT = st.text("ab<|é", max_size=6)


@given(st.lists(TEXT, max_size=6), st.lists(TEXT, max_size=6))
def test_the_longest_is_found_at_each_place(tokens: list[str], pieces: list[str]) -> None:
    text = "".join([*pieces, *tokens])
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    each = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    assert re.findall(any_of(tokens), text) == each.findall(text)


def test_many_tokens_with_one_beginning_cost_no_more_than_one() -> None:
    tokens = [*(f"<|reserved_special_token_{i}|>" for i in range(1000)), "<s>", "[INST]", "x" * 2000]
    pattern = re.compile(any_of(tokens))
    begun = time.perf_counter()
    for text in ("<" * 300_000, "<|" * 150_000, "<|reserved_special_token_" * 12_000):
        assert pattern.findall(text) == []
    assert time.perf_counter() - begun < 2  # one after the other: ten times as much
