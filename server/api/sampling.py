"""From the fields of a body to the parameters of a sequence, checked against the model."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from server.api.errors import invalid, too_long
from server.api.wire import SamplingFields
from server.generation import ModelCard
from server.step import SamplingParams

# OpenAI's defaults, the last resort after the request's value and the model's generation config.
_DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(body: SamplingFields, model: ModelCard, logprobs: int | None) -> SamplingParams:
    """All but the seed. Raises APIError 400 for token ids that are not in the vocabulary."""
    check_ids("logit_bias", list(body.logit_bias), model)
    check_ids("stop_token_ids", body.stop_token_ids, model)
    chosen: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        asked = getattr(body, name)
        chosen[name] = asked if asked is not None else model.default_sampling.get(name, default)
    top_k = int(chosen.pop("top_k"))
    return SamplingParams(
        **chosen,
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias,
        logprobs=logprobs,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model.eos_token_ids),
    )


def sibling(params: SamplingParams, seed: int, index: int) -> SamplingParams:
    """`params` for choice `index` of a prompt. The first keeps `seed`; the others' are derived from it.

    A derived seed depends on (seed, index) alone, so that a choice is the same whichever others were asked for.
    """
    if index:
        digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
    return dataclasses.replace(params, seed=seed)


def output_cap(asked: int, prompt_tokens: int, model: ModelCard) -> int:
    """`max_tokens` cut to the room that the prompt leaves. Raises APIError 400 if it leaves none."""
    room = model.max_model_len - prompt_tokens
    if room < 0 or (room == 0 and asked > 0):
        raise too_long(
            f"The prompt has {prompt_tokens} tokens, but prompt and output together may have at most "
            f"{model.max_model_len} ({model.limited_by}), which leaves no room for an output. Shorten the prompt."
        )
    return min(asked, room)


def check_ids(field: str, ids: list[int], model: ModelCard) -> None:
    """Raises APIError 400 unless all are token ids of the model."""
    if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        shown = str(bad) if abs(bad) < 10**20 else "a number of more than 20 digits"
        raise invalid(field, f"'{field}' must hold token ids from 0 to {model.vocab_size - 1}; got {shown}.")
