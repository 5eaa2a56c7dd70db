"""Prompts for the text between two others."""

import pytest
from tokenizers import AddedToken

from server.text.fim import fim_prompt, fim_tokens
from server.text.tokenizer import Tokenizer
from tests.text.templates import chat_tokenizer, wrapped


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_prefix_then_suffix_then_what_is_missing(names: tuple[str, str, str], adds_bos: bool) -> None:
    made = chat_tokenizer(None, adds_bos)
    made.add_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    tokenizer = Tokenizer(made)
    tokens = fim_tokens(tokenizer)
    assert tokens is not None
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f(", "):"))
    bos = "<s>" if adds_bos else ""
    first, second, third = names
    text = tokenizer.decode(fim_prompt(tokenizer, tokens, prefix, suffix), skip_special_tokens=False)
    assert text == f"{bos}{first}def f({second}):{third}"
    assert fim_prompt(tokenizer, tokens, prefix, suffix, add_special_tokens=False)[0] == tokens[0]


def test_a_vocabulary_without_such_tokens(embedded: Tokenizer) -> None:
    assert fim_tokens(wrapped(None)) is None
    assert fim_tokens(embedded) is None
