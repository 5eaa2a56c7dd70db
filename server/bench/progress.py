"""One line of progress on standard error, rewritten in place on a terminal."""

from __future__ import annotations

import shutil
import sys


class ProgressLine:
    """`show` replaces the line; off a terminal it prints a line only when `milestone` is set."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def show(self, text: str, milestone: bool = False) -> None:
        if text == self._last:
            return
        self._last = text
        if self._terminal:
            shown = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be taken back
            print(f"\r\x1b[2K{shown}", end="", file=sys.stderr, flush=True)
        elif milestone:
            print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave an empty line behind, so that results start at its beginning."""
        if self._terminal and self._last:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._last = ""
