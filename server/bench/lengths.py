"""A mix of lengths as people's conversations have them, instead of prompts and answers that are all about as long."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from statistics import NormalDist, fmean

PROMPT_TOKENS, OUTPUT_TOKENS = 161, 338
"""Means of the conversations of ShareGPT as the paper of PagedAttention measured them (arXiv:2309.06180, figure 11)."""

SPREAD = 0.8
"""Deviation of the lengths' logarithms: half of them are below 0.73 of the mean, the longest of a mix is 5 times it."""

COUNT = 64
PIECES, PIECE = 8, 1000


def lognormal(mean: int, count: int = COUNT, spread: float = SPREAD) -> list[int]:
    """`count` lengths in order, the middles of as many equal parts of a lognormal distribution, scaled to this mean.

    So a mix is the same in every run, and its mean right without thousands of requests.
    """
    normal = NormalDist(0.0, spread)
    parts = [math.exp(normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    return [max(1, round(mean * part / fmean(parts))) for part in parts]


async def mixed(text: str, tag: str, count: Callable[[str], Awaitable[int]], seed: int) -> list[tuple[str, int]]:
    """Prompts cut out of `text`, and how many tokens each is to be answered with: all that one lap asks for.

    tag: what will be put before each prompt, as long as its kind gets; the lengths of prompts include it.
    count: asks the server for the tokens of a prompt, so that this needs no tokenizer. Pieces of the text, PIECES of
        PIECE characters each, give the characters of a token; single prompts are off by what their own differ from it.
    seed: of which prompt has which answer.
    """
    source = (text + "\n\n") * math.ceil(16 * (PROMPT_TOKENS + PIECE) / len(text) + 1)
    pieces = [source[start : start + PIECE] for start in range(0, len(text), -(-len(text) // PIECES))]
    per_token = PIECE * len(pieces) / sum([await count(piece) for piece in pieces])
    of_tag = await count(tag) if tag else 0
    prompts, outputs = lognormal(PROMPT_TOKENS), lognormal(OUTPUT_TOKENS)
    Random(seed).shuffle(outputs)
    sizes = [max(1, round((tokens - of_tag) * per_token)) for tokens in prompts]
    return list(zip(_cut(source, len(text), sizes), outputs, strict=True))


def _cut(source: str, period: int, sizes: Sequence[int]) -> list[str]:
    """Parts of these sizes, each from where the one before ended, starting again where that is past `period`."""
    parts, start = [], 0
    for size in sizes:
        parts.append(source[start : start + size])
        start = (start + size) % period
    return parts
