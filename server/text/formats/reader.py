"""Reading a reply that arrives in pieces: parsers are generators that pause where the text goes no further yet.

What a parser does depends on the text and on where it ends, never on where it was cut: every decision waits until it is
certain, and text is handed on as soon as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Waiting: TypeAlias = Generator[None, None, T]
"""A parser: it yields to wait for more text, and returns what it read."""

Sink: TypeAlias = Callable[[str], None]

_SPACES = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r"[A-Za-z0-9+\-.,: \t\r\n]+")  # of JSON strings and brackets: scalars and what is between them
_SCALAR = re.compile(r"[A-Za-z0-9+\-.]+")
_CLOSING = {"{": "}", "[": "]"}
_CONTROL = {code: f"\\u{code:04x}" for code in range(0x20)} | {
    ord(char): json.dumps(char)[1:-1] for char in "\b\f\n\r\t"
}


class Malformed(Exception):
    """The text is not what the format says, or ends too early."""


class Reader:
    """The text of a reply so far. `text[pos:]` is not read yet; nothing before `mark` is needed any more."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.mark = 0
        self.ended = False

    def feed(self, text: str) -> None:
        self.text = self.text[self.mark :] + text
        self.pos -= self.mark
        self.mark = 0

    def more(self) -> Waiting[bool]:
        """Wait for a character; False where the reply is over."""
        while self.pos == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Waiting[str]:
        """The next character.

        Raises:
            Malformed: there is none.
        """
        if not (yield from self.more()):
            raise Malformed
        return self.text[self.pos]

    def skip_spaces(self) -> Waiting[None]:
        while (yield from self.more()):
            match = _SPACES.match(self.text, self.pos)
            assert match is not None
            self.pos = match.end()
            if self.pos < len(self.text):
                return

    def starts_with(self, choices: Sequence[str]) -> Waiting[str | None]:
        """The first of `choices` that the text goes on with, which is read; None where it is none of them."""
        while True:
            for choice in choices:
                if self.text.startswith(choice, self.pos):
                    self.pos += len(choice)
                    return choice
                if not self.ended and choice.startswith(self.text[self.pos :]):
                    break
            else:
                return None
            yield

    def expect(self, literal: str) -> Waiting[None]:
        """Read `literal`.

        Raises:
            Malformed: the text goes on differently.
        """
        if (yield from self.starts_with([literal])) is None:
            raise Malformed

    def until(self, ends: Sequence[str], limit: int | None = None) -> Waiting[str]:
        """Read up to the first of `ends`, which is not read.

        Raises:
            Malformed: none of them comes, or not within `limit` characters.
        """
        longest = max(map(len, ends))
        while True:
            found = [place for end in ends if (place := self.text.find(end, self.pos)) >= 0]
            length = len(self.text) - self.pos
            if found and (limit is None or min(found) - self.pos <= limit):
                read = self.text[self.pos : min(found)]
                self.pos = min(found)
                return read
            if self.ended or found or (limit is not None and length > limit + longest):
                raise Malformed
            yield

    def text_before(self, markers: Sequence[str], sink: Sink) -> Waiting[str | None]:
        """Hand on text up to the first of `markers`, which is read and returned; None where the reply ends without.

        White space before a marker is not handed on; `mark` is where it begins. Only white space and what may still
        become a marker is held back.
        """
        while True:
            text, start = self.text, self.pos
            found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker, start)) >= 0]
            end = min(found)[0] if found else len(text) - self._beginning(markers)
            if not found and self.ended:
                end = len(text)
            elif markers:
                end = start + len(text[start:end].rstrip())
            if end > start:
                sink(text[start:end])
            self.pos = self.mark = end
            if found:
                place, _, marker = min(found)
                self.pos = place + len(marker)
                return marker
            if self.ended:
                return None
            yield

    def _beginning(self, markers: Sequence[str]) -> int:
        """Length of the longest end of the unread text that is the beginning of a marker."""
        unread = self.text[self.pos :]
        longest = 0
        for marker in markers:
            for length in range(min(len(marker) - 1, len(unread)), longest, -1):
                if unread.endswith(marker[:length]):
                    longest = length
                    break
        return longest

    def json_string(self, sink: Sink) -> Waiting[None]:
        """Read a JSON string with its quotes. Control characters, which JSON does not allow, are escaped."""
        yield from self.expect('"')
        sink('"')
        while (char := (yield from self.peek())) != '"':
            if char == "\\":
                self.pos += 1
                escape = "\\" + (yield from self.peek())
                self.pos += 1
                sink(escape)
                continue
            match = _IN_STRING.match(self.text, self.pos)
            assert match is not None
            self.pos = match.end()
            sink(match[0].translate(_CONTROL))
        self.pos += 1
        sink('"')

    def json_value(self, sink: Sink) -> Waiting[None]:
        """Read a JSON value, handing on its text as it comes. Brackets and strings must be right, no more is checked.

        Raises:
            Malformed: at what belongs in no JSON value.
        """
        char = yield from self.peek()
        if char == '"':
            yield from self.json_string(sink)
            return
        if char not in _CLOSING:
            yield from self._scalar(sink)
            return
        open_brackets: list[str] = []
        while True:
            char = yield from self.peek()
            if char == '"':
                yield from self.json_string(sink)
            elif char in _CLOSING:
                open_brackets.append(char)
                self.pos += 1
                sink(char)
            elif char in "}]":
                if _CLOSING[open_brackets.pop()] != char:
                    raise Malformed
                self.pos += 1
                sink(char)
                if not open_brackets:
                    return
            elif match := _OUTSIDE.match(self.text, self.pos):
                self.pos = match.end()
                sink(match[0])
            else:
                raise Malformed

    def _scalar(self, sink: Sink) -> Waiting[None]:
        empty = True
        while (yield from self.more()) and (match := _SCALAR.match(self.text, self.pos)):
            self.pos = match.end()
            sink(match[0])
            empty = False
        if empty:
            raise Malformed

    def read_json(self) -> Waiting[str]:
        """A whole JSON value as text."""
        pieces: list[str] = []
        yield from self.json_value(pieces.append)
        return "".join(pieces)
