"""JSON that takes long to write, written in many short steps: one long one would stop all other threads meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator

# A million numbers in one go take a third of a second.
_AT_ONCE = 256
# Lists of larger objects (choices, items, their scores) are this deep in answers.
_DEPTH = 6


def dump(value: object) -> str:
    """`value` as `json.dumps` writes it. Belongs in a worker."""
    return "".join(_pieces(value, _DEPTH))


def _pieces(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, dict) and depth:
        before = "{"
        for key, item in value.items():
            yield f"{before}{json.dumps(key)}: "
            yield from _pieces(item, depth - 1)
            before = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple) and depth and value and isinstance(value[0], dict | list | tuple):
        before = "["
        for item in value:
            yield before
            yield from _pieces(item, depth - 1)
            before = ", "
        yield "]"
    elif isinstance(value, list | tuple):
        parts = (json.dumps(value[begin : begin + _AT_ONCE])[1:-1] for begin in range(0, len(value), _AT_ONCE))
        yield f"[{', '.join(parts)}]"
    else:
        yield json.dumps(value)
