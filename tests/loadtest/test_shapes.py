"""The shapes of the load, without locust."""

from __future__ import annotations

from loadtest.shapes import SHAPES, users_at


def test_ramp_climbs_evenly() -> None:
    assert [users_at(SHAPES["ramp"], 10, share) for share in (0, 0.05, 0.5, 0.95)] == [1, 1, 5, 10]


def test_spike_is_the_middle_third() -> None:
    assert [users_at(SHAPES["spike"], 10, share) for share in (0, 0.32, 0.34, 0.66, 0.67, 0.99)] == [2, 2, 10, 10, 2, 2]


def test_soak_holds() -> None:
    assert [users_at(SHAPES["soak"], 10, share) for share in (0, 0.5, 0.99)] == [10] * 3


def test_each_ends() -> None:
    assert [users_at(shape, 10, 1.0) for shape in SHAPES.values()] == [None] * 3
