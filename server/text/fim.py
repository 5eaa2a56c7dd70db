"""Filling in the middle: the tokens by which models trained for it are shown what comes before and after a gap.

The method is Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (arXiv:2207.14255); each
family has its own tokens for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.text.tokenizer import Tokenizer

# (before the prefix, before the suffix, before the middle)
_PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
# (before the suffix, before the prefix): what comes after the prefix is the middle.
_SUFFIX_FIRST = (("[SUFFIX]", "[PREFIX]"),)  # Codestral
# What these models write after the middle, beside their end of sequence.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>", "<file_sep>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillInTheMiddle:
    """How one tokenizer lays out a gap: `opening` and `second` stand before the two texts, `closing` after them.

    suffix_first: whether the text after the gap comes first.
    end_ids: tokens that end the middle.
    """

    opening: int
    second: int
    closing: int | None
    suffix_first: bool
    end_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillInTheMiddle | None:
        """None where the tokenizer has no tokens for it."""
        ends = frozenset(found for token in _ENDS if (found := tokenizer.token_id(token)) is not None)
        for tokens in _PREFIX_FIRST:
            opening, second, closing = map(tokenizer.token_id, tokens)
            if opening is not None and second is not None and closing is not None:
                return cls(opening, second, closing, False, ends)
        for names in _SUFFIX_FIRST:
            opening, second = map(tokenizer.token_id, names)
            if opening is not None and second is not None:
                return cls(opening, second, None, True, ends)
        return None

    def lay_out(self, prefix: Sequence[int], suffix: Sequence[int], bos_token_id: int | None) -> list[int]:
        """The prompt for the text between `prefix` and `suffix`; a beginning-of-text token stays at its beginning."""
        head, prefix = ([prefix[0]], prefix[1:]) if prefix and prefix[0] == bos_token_id else ([], prefix)
        first, then = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        tail = [] if self.closing is None else [self.closing]
        return [*head, self.opening, *first, self.second, *then, *tail]


def encode_suffix(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text that goes on where another ended, without the space that some tokenizers begin with."""
    if not tokenizer.trims_start:
        return tokenizer.encode(text, add_special_tokens=False)
    anchor = "☺"  # no token has it beside other characters
    return tokenizer.encode(anchor + text, add_special_tokens=False)[len(tokenizer.encode(anchor, False)) :]
