"""What the value of an option may be: sizes, names, keys and origins, from a flag, a variable or a file."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

MOST_BYTES = 2**50
"""More than any machine has."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 2**10), ("I", 2**10), ("IB", 2**10), ("B", 10**3))
}


def parse_size(value: object) -> object:
    """Turn '8GiB', '512 MB' or '1.5g' into bytes; anything that is not text passes unchanged.

    K, Ki, KiB (and so on) are powers of 1024, KB of 1000. Raises ValueError where the text is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None:
        raise ValueError(f"{value!r} is no size")
    unit = match[2].upper()
    if unit not in _UNITS:
        raise ValueError(f"{match[2]!r} is no unit of size")
    return int(Decimal(match[1]) * _UNITS[unit])


def _split_names(value: object) -> object:
    """Names come as one comma-separated text from a variable or a file, as a list from flags."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list):
        return value
    return [part.strip() for item in values for part in (item.split(",") if isinstance(item, str) else [item])]


def check_key(key: SecretStr) -> SecretStr:
    """An API key must fit into a header. Raises ValueError, which does not show it."""
    if re.fullmatch(r"[!-~]{1,512}", key.get_secret_value()) is None:
        raise ValueError("a key is 1 to 512 printable ASCII characters without spaces")
    return key


Size = Annotated[int, BeforeValidator(parse_size)]
Names = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_split_names)]
Secrets = Annotated[list[Annotated[SecretStr, AfterValidator(check_key)]], NoDecode, BeforeValidator(_split_names)]
Origins = Annotated[
    list[Annotated[str, Field(pattern=r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$")]],
    NoDecode,
    BeforeValidator(_split_names),
]
