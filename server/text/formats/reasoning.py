"""How models mark what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass

from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around reasoning."""

    open: str
    close: str


KNOWN = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<reasoning>", "</reasoning>"),
)


def find_tags(source: str, tokenizer: Tokenizer) -> Tags | None:
    """The tags that a chat template writes or reads, else those that are tokens of the vocabulary, else None."""
    for tags in KNOWN:
        if tags.close in source:
            return tags
    for tags in KNOWN:
        if all(tokenizer.token_id(tag) is not None for tag in (tags.open, tags.close)):
            return tags
    return None


def is_open(tags: Tags, prompt_text: str, tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends inside reasoning: the template opens it, or the message that is continued does.

    A tag in an earlier message does not count: a turn's end, a special token, follows it.
    """
    tail = prompt_text[prompt_text.rfind(tags.open) :] if tags.open in prompt_text else ""
    if not tail or tags.close in tail:
        return False
    tail = tail[len(tags.open) :]
    return not tail.strip() or not any(text in tail for text in tokenizer.special_texts)
