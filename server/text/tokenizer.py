"""The tokenizer: text to token ids and back, and the bytes behind a single token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

_Speller = Callable[[str], bytes]

_MANY = 4096


class Tokenizer:
    """A Hugging Face tokenizer, fast or slow, with the few operations the server needs. Safe to use from any thread.

    eos_token_id, bos_token_id: None where the tokenizer has no such token.
    vocab_size: one above the greatest token id, added tokens included.
    special_ids: tokens that `skip_special_tokens` leaves out.
    spells: whether every token stands for the same bytes wherever it occurs, so that text is its tokens' bytes joined.
    trims_start: whether the spaces of the first token of a text are not part of it (SentencePiece's dummy prefix).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Backend | None = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self._spell: _Speller | None = None
        self.trims_start = False
        if self._backend is None:
            self.special_ids = frozenset(tokenizer.all_special_ids)
        else:
            # transformers switches these on the shared backend at every call, which fails when threads meet there.
            self._backend.no_truncation()
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
            self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
            if self._backend.decoder is not None:
                self._spell, self.trims_start = _speller(json.loads(self._backend.decoder.__getstate__()))
        self._bytes: dict[int, bytes | None] = {}

    @classmethod
    def load(cls, path: str, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a local directory or, if it is none, the Hugging Face hub.

        Raises:
            OSError, ValueError: as transformers' AutoTokenizer, when there is no tokenizer it can load.
        """
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code))

    @property
    def spells(self) -> bool:
        return self._spell is not None

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja sources of the model's chat templates by name; a single one is called "default"."""
        templates: str | dict[str, str] | None = self._tokenizer.chat_template
        if templates is None:
            return {}
        return {"default": templates} if isinstance(templates, str) else dict(templates)

    @property
    def special_token_names(self) -> dict[str, Any]:
        """What chat templates know special tokens as: {"bos_token": "<s>", ...}."""
        return dict(self._tokenizer.special_tokens_map)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """How the special tokens are written, longest first."""
        texts = self._tokenizer.convert_ids_to_tokens(sorted(self.special_ids))
        return tuple(sorted(texts, key=len, reverse=True))

    @cached_property
    def added_texts(self) -> tuple[str, ...]:
        """How the tokens are written that are found in a text before all else, special or not, longest first."""
        if self._backend is None:
            texts = {*self._tokenizer.added_tokens_encoder, *self.special_texts}
        else:
            texts = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        return tuple(sorted(texts, key=len, reverse=True))

    def definition(self) -> dict[str, Any] | None:
        """What `tokenizers.Tokenizer.from_str` makes this tokenizer from; None for one in Python."""
        if self._backend is None:
            return None
        definition: dict[str, Any] = json.loads(self._backend.to_str())
        return definition

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, None where it has none."""
        if self._backend is not None:
            return self._backend.token_to_id(token)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary.get(token)

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of the longest token, so that n bytes of text make at least n / longest_token tokens.

        None where that does not follow: where one token may stand for a whole run of unknown text (all but byte-level
        tokenizers), or text is changed before it is encoded.
        """
        if self._backend is None or self._spell is not _spell_byte_level or self._backend.normalizer is not None:
            return None
        return max(len(self.token_bytes(token_id) or b"") for token_id in range(self.vocab_size))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        Raises:
            ValueError: the text holds half a surrogate pair, which is no character.
        """
        check_characters(text)
        if self._backend is not None:
            # Only the batch call lets other threads run: `encode` would stop the event loop for as long as it takes.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, in which no special token is recognised and to which none is added; in Python alone.

        Of a fast tokenizer this changes the state that all threads share: `server.text.literals` makes a copy instead.
        """
        assert self._backend is None
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`, spaces as they are; bytes that form no character become U+FFFD."""
        if self._backend is not None and len(ids) > _MANY:
            # As in `encode`, only the batch call lets other threads run; for a few tokens it is not worth its price.
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        if self._backend is not None:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list only for a list of lists
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The tokens as they stand in the vocabulary, spaces and bytes spelled in its own way; "" for none."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(ids))]

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for, which need not be whole characters.

        None for an id without a token, and where tokens have no bytes of their own (the text of a token depends on its
        neighbours, as in WordPiece).
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._token_bytes(token_id)
        return self._bytes[token_id]

    def _token_bytes(self, token_id: int) -> bytes | None:
        if self._spell is None or self._backend is None or token_id < 0:
            return None
        token = self._backend.id_to_token(token_id)
        return None if token is None else self._spell(token)


def check_characters(text: str) -> None:
    """Raises ValueError where `text` holds half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is half a surrogate pair, not a character") from None


def _speller(decoder: dict[str, Any]) -> tuple[_Speller | None, bool]:
    """How a token's string becomes bytes under a decoder of the `tokenizers` library, and whether it trims the start.

    The speller is None for decoders whose tokens depend on their neighbours.
    """
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _spell_byte_level, False
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = trims_start = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme} if not fused:
                replacements.append((replacement, " "))
                trims_start = trims_start or scheme != "never"
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "stop": 0} if fused:
                trims_start = True
            case _:
                return None, False

    def spell(token: str) -> bytes:
        if byte_fallback and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)):
            return bytes.fromhex(byte[1])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return spell, trims_start


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level BPE writes bytes as (GPT-2, Radford et al. 2019): printable Latin-1 characters stand
    for themselves, the other bytes for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()  # an added token, kept as its own text
