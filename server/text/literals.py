"""Special tokens that a client writes stay text: only those the chat template writes become control tokens.

A literal `<|im_end|>` in a message would otherwise end the turn in which it stands, and what follows it would speak
with another's voice. Tokens that are not special (Qwen's `<think>` and `<tool_call>`) are left to the tokenizer:
templates look for them in messages.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import groupby, takewhile
from operator import eq
from threading import Lock
from typing import TYPE_CHECKING, Any

from server.text.tokenizer import Tokenizer, check_characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_PRIVATE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # planes 15 and 16


class Literals:
    """Stand-ins for the special tokens in what a client sent: one private character each.

    One character, so that a template that cuts, joins or escapes strings treats it as a whole. None of them occurs
    in the strings or in `source`, the template.

    Raises:
        ValueError: there is no such character.
    """

    def __init__(self, pattern: re.Pattern[str], special: frozenset[str], source: str, *values: object) -> None:
        self.stand_ins: dict[str, str] = {}
        self._pattern = pattern
        self._special = special
        written = {found for text in _strings(values) for found in pattern.findall(text)} & special
        if written:
            used = set(source).union(*_strings(values))
            free = [chr(code) for codes in _PRIVATE for code in codes if chr(code) not in used]
            if len(free) < len(written):
                raise ValueError("beside special tokens written as text, there is every private character of Unicode")
            self.stand_ins = dict(zip(sorted(written), free, strict=False))

    def hide(self, value: Any) -> Any:
        """`value` with the stand-ins in all its strings."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self.stand_ins.get(found[0], found[0]), value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """`text` as the client would have written it."""
        return text.translate({ord(char): literal for literal, char in self.stand_ins.items()})


class LiteralEncoder:
    """Encodes rendered conversations. Safe to use from any thread.

    For text with literals it has a copy of the tokenizer in which special tokens have other, secret names. In a text
    where the template's tokens go by those names, all is encoded at once as without literals, and the literals, being
    no tokens there, as any other text. Making the copy takes seconds for a large vocabulary, during which other threads
    may stand still: `prepare` does it ahead.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_texts)
        self._pattern = re.compile(any_of(tokenizer.added_texts))
        secret = secrets.token_hex(8)
        self._names = {text: f"{secret}{index:08x}" for index, text in enumerate(sorted(self._special))}
        self._lock = Lock()

    def prepare(self) -> Backend | None:
        """The copy, made at the first call; None for a tokenizer in Python."""
        with self._lock:
            return self._copy

    def literals(self, source: str, *values: object) -> Literals:
        """Stand-ins for the special tokens that are written in `values`. Raises ValueError where none is left."""
        return Literals(self._pattern, self._special, source, *values)

    def encode(self, text: str, literals: Literals) -> list[int]:
        """Token ids of a rendered `text` with stand-ins; nothing is added to it.

        Raises:
            ValueError: the text holds half a surrogate pair, which is no character.
        """
        if not literals.stand_ins:
            return self._tokenizer.encode(text, add_special_tokens=False)
        check_characters(text)
        copy = self.prepare()
        if copy is None:
            return self._encode_apart(text, literals)
        named = self._pattern.sub(lambda found: self._names.get(found[0], found[0]), text)
        return list(copy.encode_batch_fast([literals.show(named)], add_special_tokens=False)[0].ids)

    @cached_property
    def _copy(self) -> Backend | None:
        definition = self._tokenizer.definition()
        if definition is None:
            return None
        from tokenizers import Tokenizer as Backend

        return Backend.from_str(json.dumps(_renamed(definition, self._names)))

    def _encode_apart(self, text: str, literals: Literals) -> list[int]:
        """For tokenizers in Python: the literals by themselves, and what is between them."""
        ids: list[int] = []
        for piece in re.split(f"([{''.join(literals.stand_ins.values())}])", text):
            if piece in literals.stand_ins.values():
                ids += self._tokenizer.encode_plain(literals.show(piece))
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids


def any_of(texts: Iterable[str]) -> str:
    """A regular expression for the longest of `texts`, each beginning they share written once.

    Tried one after the other, a thousand reserved tokens make a megabyte of "<" the work of many seconds, in which no
    other thread runs.
    """
    distinct = sorted(filter(None, set(texts)))
    return _branches(distinct) if distinct else r"(?!)"


def _branches(texts: list[str]) -> str:
    """The same for sorted texts, none twice."""
    branches = []
    for _, group in groupby(filter(None, texts), key=lambda text: text[0]):
        same = list(group)
        length = sum(takewhile(bool, map(eq, same[0], same[-1])))  # of the beginning that all share: they are sorted
        branches.append(re.escape(same[0][:length]) + _branches([text[length:] for text in same]))
    if not branches:
        return ""
    any_branch = f"(?:{'|'.join(branches)})"
    return any_branch if texts[0] else f"{any_branch}?"  # one of them ends here


def _strings(value: object) -> Iterator[str]:
    """All strings in `value`, the keys of its objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _renamed(definition: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The definition of a tokenizer in the form of the `tokenizers` library, its tokens renamed, ids unchanged.

    Merges that make or use such a token go: plain text must not arrive at one.
    """
    model = dict(definition["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in definition["added_tokens"]
    ]
    return {**definition, "model": model, "added_tokens": added, "post_processor": None}
