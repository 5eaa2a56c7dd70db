"""Text of a growing output, shown as soon as it is certain."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.text.stops import StopMatcher
from server.text.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one more token made certain.

    text: characters to show now.
    released: how many of the tokens not released before have, from now on, all their text shown.
    stop: the stop string that ended the text, None while it goes on.
    """

    text: str
    released: int
    stop: str | None


class TextStream:
    """Turns output tokens into text that is only ever appended to.

    Held back are the bytes of an unfinished character and exactly the longest end of the text that may still become a
    stop string. The text ends where a stop string first appears in it; one that is complete within the first
    `min_tokens` tokens does not count. The prompt's text stops nothing, but a character begun in the prompt and
    completed by the output belongs to the output.

    pieces: each token's share of the text, before any cut at a stop string. A token that ends inside a character leaves
        it to the one that completes it; if none does, U+FFFD goes to the last token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str],
        include_stop_str: bool,
        skip_special_tokens: bool,
        min_tokens: int,
        shown_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        skipped = tokenizer.special_ids - shown_special_ids if skip_special_tokens else frozenset()
        decoder = ByteDecoder if tokenizer.spells else WindowDecoder
        self._decoder: Decoder = decoder(tokenizer, prompt_ids, skipped)
        self._stops = StopMatcher(stop)
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._held = ""
        self._num_shown = 0  # characters
        self._ends: deque[int] = deque()  # where in the text each token not released ends
        self._num_open = 0  # last tokens that end inside one and the same character
        self._ended = False
        self.pieces: list[str] = []

    def append(self, token_id: int) -> Delta:
        """Take the next token.

        Raises:
            RuntimeError: the text has already ended.
        """
        if self._ended:
            raise RuntimeError("a token came after the end of the text")
        piece = self._decoder.push(token_id)
        self.pieces.append(piece)
        self._ends.append(self._num_shown + len(self._held) + len(piece))
        if not self._decoder.unfinished:
            self._num_open = 0
        elif piece:
            self._num_open = 1
        else:
            self._num_open += 1
        return self._show(piece)

    def finish(self) -> Delta:
        """No token follows: show what was held back. Empty after the text has ended."""
        if self._ended:
            return Delta("", 0, None)
        self._ended = True
        return self._show(self._settle())

    def _show(self, piece: str) -> Delta:
        self._held += piece
        match = self._stops.feed(piece, counts=len(self.pieces) > self._min_tokens)
        if match is not None:
            text = self._held[: (match.end if self._include_stop_str else match.start) - self._num_shown]
            if not self._ended:
                self._settle()
                self._ended = True
            return Delta(text, self._release(len(self._ends)), match.stop)
        length = len(self._held) - (0 if self._ended else self._stops.held)
        text, self._held = self._held[:length], self._held[length:]
        self._num_shown += length
        if self._ended:
            return Delta(text, self._release(len(self._ends)), None)
        shown = 0
        for end in self._ends:
            if end > self._num_shown or shown == len(self._ends) - self._num_open:
                break
            shown += 1
        return Delta(text, self._release(shown), None)

    def _settle(self) -> str:
        """Give up on an unfinished character."""
        rest = self._decoder.finish()
        if rest:
            self.pieces[-1] += rest
        return rest

    def _release(self, count: int) -> int:
        for _ in range(count):
            self._ends.popleft()
        return count


class Decoder(Protocol):
    """Tokens to text, a token at a time. `unfinished` tells whether the last ones end inside a character."""

    @property
    def unfinished(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class ByteDecoder:
    """For tokenizers whose tokens stand for fixed bytes: the bytes joined, decoded as UTF-8 as they come.

    Bytes that form no character become U+FFFD as in Unicode 16, section 3.9 (one for each maximal part of a character),
    which is what the `tokenizers` library does for byte-level BPE. For byte-fallback tokens it is more careful than
    the library, which replaces a whole run of byte tokens for one that is wrong, so that a text shown could change.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._pending = b""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= 3:  # a character is at most four bytes long, so no more can be unfinished
                break
        self._at_start = not tail
        for length in range(min(3, len(tail)), 0, -1):
            if not codecs.utf_8_decode(tail[-length:], "replace", False)[1]:
                self._pending = tail[-length:]
                break
        # Of a character that the prompt begins and nothing completes, each U+FFFD is the prompt's.
        self._prompt_rest = self._pending.decode(errors="replace")

    @property
    def unfinished(self) -> bool:
        return bool(self._pending)

    def push(self, token_id: int) -> str:
        data = self._bytes(token_id)
        if not data:
            return ""
        if self._at_start:
            self._at_start = False
            if self._tokenizer.trims_start and b" " in data:
                data = self._tokenizer.decode([token_id], False).encode()
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        if self._prompt_rest and used:
            text = text.removeprefix(self._prompt_rest)
            self._prompt_rest = ""
        return text

    def finish(self) -> str:
        rest = "" if self._prompt_rest else self._pending.decode(errors="replace")
        self._pending = b""
        return rest

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id) or b""


class WindowDecoder:
    """For any other tokenizer: decodes a short window of tokens with and without the newest one and takes the rest.

    The window starts with tokens already shown, so that what a tokenizer does to the start of a text is done to both
    and cancels out.
    """

    # A character has no more bytes, so U+FFFD at the end of as many tokens is final, and so is no text at all (some
    # tokenizers leave out what is no character).
    _MOST_OPEN = 4
    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window = [token_id for token_id in prompt_ids if token_id not in self._skipped][-self._CONTEXT :]
        self._num_shown = len(self._window)
        self._text = self._decode()

    @property
    def unfinished(self) -> bool:
        return self._num_shown < len(self._window)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        piece = text[len(self._text) :]
        num_open = len(self._window) - self._num_shown
        if (not piece or piece.endswith(_UNKNOWN)) and num_open < self._MOST_OPEN:
            return ""
        if piece:
            del self._window[: self._num_shown]
        else:
            del self._window[self._num_shown :]  # without a text they would only make the window grow
        self._num_shown = len(self._window)
        self._text = self._decode()
        return piece

    def finish(self) -> str:
        piece = self._decode()[len(self._text) :]
        self._num_shown = len(self._window)
        return piece

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
