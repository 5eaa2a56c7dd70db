"""How many users there are while a load test goes on."""

from __future__ import annotations

import math
from collections.abc import Callable

SPIKE_FLOOR = 0.2  # share of the users that are there before and after a spike

Shape = Callable[[float], float]
"""From the share of the time that is over to the share of the users that are there, both from 0 to 1."""


def ramp(over: float) -> float:
    """From none to all of them, evenly: at how many do latencies bend?"""
    return over


def spike(over: float) -> float:
    """All of them at once in the middle third, a fifth before and after: is the queue bounded, and soon empty again?"""
    return 1.0 if 1 / 3 <= over < 2 / 3 else SPIKE_FLOOR


def soak(over: float) -> float:
    """All of them throughout: do memory, latencies or counters drift?"""
    return 1.0


SHAPES: dict[str, Shape] = {"ramp": ramp, "spike": spike, "soak": soak}


def users_at(shape: Shape, users: int, over: float) -> int | None:
    """Of at most so many, at least 1; None at the end."""
    return max(1, math.ceil(users * shape(over))) if over < 1.0 else None
