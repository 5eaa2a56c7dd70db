from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from server.text.tokenizer import Tokenizer
from tests.text.conftest import CORPUS, KINDS, made

SPELLING = ["byte_level", "byte_fallback_bpe", "byte_fallback_unigram", "metaspace"]


@pytest.mark.parametrize("kind", KINDS)
def test_text_survives_the_round_trip(kind: str) -> None:
    tokenizer = made(kind)
    text = "the lazy dog does not mind the quick brown fox"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), True) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_kept_or_left_out(kind: str) -> None:
    tokenizer = made(kind)
    assert tokenizer.eos_token_id is not None
    ids = [*tokenizer.encode("the dog", add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, True).rstrip() == "the dog"
    assert tokenizer.decode(ids, False) != tokenizer.decode(ids, True)
    assert tokenizer.eos_token_id in tokenizer.special_ids


@pytest.mark.parametrize("kind", SPELLING)
def test_joined_bytes_are_the_text(kind: str) -> None:
    tokenizer = made(kind)
    for text in CORPUS[:4]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids)
        decoded = tokenizer.decode(ids, False)
        assert joined.decode() == (" " + decoded if tokenizer.trims_start else decoded)


@pytest.mark.parametrize("kind", SPELLING)
def test_every_token_of_whole_characters_has_the_bytes_of_its_text(kind: str) -> None:
    tokenizer = made(kind)
    anchor = tokenizer.encode("dog", add_special_tokens=False)
    start = len(tokenizer.decode(anchor, False))
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        assert raw is not None
        text = tokenizer.decode([*anchor, token_id], False)[start:]
        assert raw.decode(errors="replace") == text


def test_fragments_of_a_character_have_their_true_bytes() -> None:
    for kind in ("byte_level", "byte_fallback_bpe", "byte_fallback_unigram"):
        tokenizer = made(kind)
        ids = tokenizer.encode("🐘", add_special_tokens=False)
        parts = [tokenizer.token_bytes(token_id) for token_id in ids]
        assert b"".join(part or b"" for part in parts).lstrip() == "🐘".encode()
        assert len([part for part in parts if part and part[0] >= 0x80]) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_without_a_token_has_no_bytes(kind: str) -> None:
    tokenizer = made(kind)
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None
    assert tokenizer.token_bytes(-1) is None


def test_tokens_without_bytes_of_their_own_say_so() -> None:
    assert not made("word_piece").spells
    assert made("word_piece").token_bytes(20) is None


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match="character 2 "):
        made("byte_level").encode("ab\ud83d")


def test_truncation_and_padding_saved_with_a_tokenizer_are_ignored() -> None:
    backend = made("byte_level")._backend
    assert backend is not None
    copy = type(backend).from_str(backend.to_str())
    copy.enable_truncation(2)
    copy.enable_padding(length=8)
    text = "the quick brown fox"
    assert Tokenizer(PreTrainedTokenizerFast(tokenizer_object=copy)).encode(text) == made("byte_level").encode(text)


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = made("byte_level")
    texts = [f"{text} {i}" for i, text in enumerate(CORPUS)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone
        assert list(pool.map(lambda ids: tokenizer.decode(ids, True), alone)) == texts


def test_loads_from_a_directory(tmp_path: Path) -> None:
    made("byte_level")._tokenizer.save_pretrained(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded.encode("the dog 🦜") == made("byte_level").encode("the dog 🦜")
    assert (loaded.eos_token_id, loaded.bos_token_id) == (2, 1)


def test_importing_the_text_room_does_not_import_transformers() -> None:
    code = "import sys, server.text.tokenizer, server.text.stream; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.embedded
def test_the_embedded_tokenizer(embedded: Tokenizer) -> None:
    assert (embedded.vocab_size, embedded.bos_token_id, embedded.eos_token_id) == (49152, 1, 2)
    assert embedded.encode("漢") == [177, 137, 112]
    assert [embedded.token_bytes(i) for i in (10813, 116, 246)] == [b"\xf0\x9f", b"\xa6", b"\x9c"]
    text = "\n".join(CORPUS[:4])
    assert embedded.encode(text) == embedded._tokenizer.encode(text)
    for token_id in range(embedded.vocab_size):
        raw = embedded.token_bytes(token_id)
        assert raw is not None
        assert raw.decode(errors="replace") == embedded.decode([token_id], False)


@given(text=st.text(min_size=1, max_size=200))
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_makes_no_fewer_tokens_than_its_length_allows(kind: str, text: str) -> None:
    tokenizer = made(kind)
    if tokenizer.longest_token is not None:
        assert len(tokenizer.encode(text)) >= len(text) // tokenizer.longest_token


def test_the_longest_token_is_known_for_byte_level_tokenizers() -> None:
    tokenizer = made("byte_level")
    assert tokenizer.longest_token == max(len(tokenizer.token_bytes(i) or b"") for i in range(tokenizer.vocab_size))
    assert tokenizer.longest_token is not None
    assert [made(kind).longest_token for kind in KINDS if kind != "byte_level"] == [None] * (len(KINDS) - 1)
