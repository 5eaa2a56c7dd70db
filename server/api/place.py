"""A value somewhere in a body together with its path, so that a fault deep in a list is reported by its own name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from server.api.errors import APIError, invalid, show
from server.api.wire import check_text


@dataclass(frozen=True, slots=True)
class Place:
    """`value` stands at `path`, as `input[2].content`. An absent member has the value None, like one that is null.

    Every reader raises APIError 400 for a value of another kind.
    """

    value: object
    path: str

    def __getitem__(self, key: str) -> Place:
        """The member `key` of an object."""
        return Place(self.mapping().get(key), f"{self.path}.{key}")

    @property
    def absent(self) -> bool:
        return self.value is None

    def mapping(self) -> Mapping[str, object]:
        if not isinstance(self.value, dict):
            raise self.must_be("an object")
        return self.value

    def entries(self) -> list[Place]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            raise self.must_be("a list")
        return [Place(entry, f"{self.path}[{index}]") for index, entry in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.must_be("a string")
        try:
            return check_text(self.value)
        except ValueError as error:
            raise invalid(self.path, f"'{self.path}': {error}.") from None

    def flag(self) -> bool:
        """A truth value, false where absent."""
        if self.value is not None and not isinstance(self.value, bool):
            raise self.must_be("true or false")
        return bool(self.value)

    def one_of(self, options: Collection[str]) -> str:
        if not isinstance(self.value, str) or self.value not in options:
            raise self.must_be(f"one of {', '.join(show(option) for option in options)}")
        return self.value

    def check_nesting(self, most: int) -> None:
        """Without recursion: what is nested too deeply for an answer that repeats it is to be refused before."""
        level = [self.value]
        for _ in range(most):
            lists = [
                value.values() if isinstance(value, dict) else value
                for value in level
                if isinstance(value, dict | list)
            ]
            level = [value for values in lists for value in values]
            if not level:
                return
        raise invalid(self.path, f"'{self.path}' is nested more than {most} deep.")

    def must_be(self, rule: str) -> APIError:
        if self.value is None:
            return invalid(self.path, f"'{self.path}' is required: {rule}.", "missing_required_parameter")
        return invalid(self.path, f"'{self.path}' must be {rule}; got {show(self.value)}.")

    def unsupported(self, reason: str) -> APIError:
        return invalid(self.path, f"'{self.path}': {reason}.", "unsupported_parameter")
