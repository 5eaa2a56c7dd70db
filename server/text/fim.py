"""Fill-in-the-middle: prompts for the text between a prefix and a suffix (Bavarian et al. 2022)."""

from __future__ import annotations

from typing import TypeAlias

from server.text.tokenizer import Tokenizer

FimTokens: TypeAlias = tuple[int, int, int]
"""Ids of the tokens before the prefix, before the suffix and before the middle."""

_KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek, whose middle token closes the suffix
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)


def fim_tokens(tokenizer: Tokenizer) -> FimTokens | None:
    """The tokens for filling in; None where the vocabulary has none of the known ones."""
    for names in _KNOWN:
        prefix, suffix, middle = (tokenizer.token_id(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return prefix, suffix, middle
    return None


def fim_prompt(
    tokenizer: Tokenizer, tokens: FimTokens, prefix: list[int], suffix: list[int], add_special_tokens: bool = True
) -> list[int]:
    """The prompt that asks for what stands between two texts, in the order prefix, suffix, middle.

    prefix, suffix: their ids, encoded without special tokens. add_special_tokens: whether the tokens that the
    tokenizer puts before a text, if it does, come first.
    """
    before, hole, after = tokens
    first = _tokens_before(tokenizer) if add_special_tokens else []
    return [*first, before, *prefix, hole, *suffix, after]


def _tokens_before(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every text: its beginning-of-text token or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("", add_special_tokens=True)[:1] == [bos] else []
