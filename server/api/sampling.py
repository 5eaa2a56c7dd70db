"""From the fields of a body to the parameters of a sequence, checked against the model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np

from server.api.errors import invalid, too_long
from server.api.wire import SamplingFields
from server.generation import ModelCard
from server.step import Int32Array, SamplingParams


def sampling_params(body: SamplingFields, model: ModelCard, logprobs: int | None) -> SamplingParams:
    """All but the seed. Raises APIError 400 for token ids that are not in the vocabulary."""
    check_ids("logit_bias", list(body.logit_bias), model)
    check_ids("stop_token_ids", body.stop_token_ids, model)
    check_ids("allowed_token_ids", body.allowed_token_ids, model)
    chosen: dict[str, Any] = {}
    for name, default in model.sampling_defaults.items():
        asked = getattr(body, name)
        chosen[name] = default if asked is None else asked
    top_k = int(chosen.pop("top_k"))
    ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model.eos_token_ids)
    if body.allowed_token_ids and body.min_tokens and ends.issuperset(body.allowed_token_ids):
        raise invalid("allowed_token_ids", "'allowed_token_ids' are all end tokens, which 'min_tokens' rules out.")
    return SamplingParams(
        **chosen,
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias,
        logprobs=logprobs,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=ends,
    )


class AllowedTokens:
    """A constraint that permits the same tokens at every step; the end of sequence only if it is among them."""

    finished = False

    def __init__(self, token_ids: Collection[int]) -> None:
        bits = np.zeros((max(token_ids) // 32 + 1) * 32, dtype=np.uint8)
        bits[list(token_ids)] = 1
        self._mask = np.packbits(bits, bitorder="little").view("<i4")

    def fill_mask(self, mask: Int32Array) -> None:
        mask[: len(self._mask)] = self._mask
        mask[len(self._mask) :] = 0

    def accept(self, token_id: int) -> None:
        """Every step permits the same."""


def sibling(params: SamplingParams, seed: int, index: int) -> SamplingParams:
    """`params` for choice `index` of a prompt. The first keeps `seed`; the others' are derived from it.

    A derived seed depends on (seed, index) alone, so that a choice is the same whichever others were asked for.
    """
    if index:
        digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
    return dataclasses.replace(params, seed=seed)


def output_cap(asked: int, prompt_tokens: int, model: ModelCard, field: str = "prompt") -> int:
    """`max_tokens` cut to the room that the prompt, sent as `field`, leaves. Raises APIError 400 if it leaves none."""
    room = model.max_model_len - prompt_tokens
    if room < 0 or (room == 0 and asked > 0):
        raise too_long(
            f"it has {prompt_tokens} tokens, and prompt and output together may have at most {model.max_model_len} "
            f"({model.limited_by}), which leaves no room for an output.",
            field,
        )
    return min(asked, room)


def check_ids(field: str, ids: list[int], model: ModelCard) -> None:
    """Raises APIError 400 unless all are token ids of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        shown = str(bad) if abs(bad) < 10**20 else "a number of more than 20 digits"
        raise invalid(field, f"'{field}' must hold token ids from 0 to {model.vocab_size - 1}; got {shown}.")
