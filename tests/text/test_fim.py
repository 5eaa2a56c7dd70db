"""Prompts for the text between two others."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from server.text.fim import FillInTheMiddle, encode_suffix
from server.text.tokenizer import Tokenizer
from tests.text.conftest import made


def tokenizer_with(*specials: str) -> Tokenizer:
    """Bytes, then the special tokens in order from id 256 on; the first begins a text."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special) for special in specials])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=specials[0]))


@pytest.mark.parametrize(
    ("specials", "layout"),
    [
        (("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endoftext|>"), [257, 1, 2, 259, 3, 258]),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>"), [257, 1, 2, 259, 3, 258]),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|endoftext|>"), [257, 1, 2, 258, 3, 259]),
        (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), [257, 1, 2, 259, 3, 258]),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]", "<|endoftext|>"), [258, 3, 257, 1, 2]),
    ],
)
def test_each_family_has_its_layout(specials: tuple[str, ...], layout: list[int]) -> None:
    tokenizer = tokenizer_with("<s>", *specials)
    fim = FillInTheMiddle.of(tokenizer)
    assert fim is not None
    assert fim.lay_out([1, 2], [3], tokenizer.bos_token_id) == layout
    assert fim.lay_out([256, 1, 2], [3], tokenizer.bos_token_id) == [256, *layout]
    assert fim.end_ids == {260}


def test_most_models_have_none(embedded: Tokenizer) -> None:
    assert FillInTheMiddle.of(embedded) is None
    assert FillInTheMiddle.of(tokenizer_with("<s>", "<fim_prefix>")) is None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_bpe", "byte_fallback_unigram"])
def test_a_suffix_begins_without_a_space_of_its_own(kind: str) -> None:
    tokenizer = made(kind)
    ids = encode_suffix("the dog", tokenizer)
    joined = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids)
    assert joined == b"the dog"
