"""Errors about a chat body in the words of the body that it was translated from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from server.api.errors import APIError

Names: TypeAlias = Mapping[str, str]
"""regular expression of a chat field -> the route's own field; the first that matches counts"""

NONE: Names = {}


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Puts the route's own names into the `param` and the message of an APIError that passes."""
    try:
        yield
    except APIError as error:
        if error.param is not None:
            error.param = _rename(error.param, names)
        error.message = re.sub(r"(?<=')[\w.\[\]]+(?=')", lambda found: _rename(found.group(), names), error.message)
        raise


def _rename(field: str, names: Names) -> str:
    for name, own in names.items():
        renamed, count = re.subn(rf"^{name}(?![\w])", own, field)
        if count:
            return renamed
    return field
