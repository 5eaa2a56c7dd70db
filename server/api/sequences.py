"""From a checked body and its tokenized prompt to the sequences that the engine is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.api.budget import kv_budget
from server.api.errors import invalid
from server.api.sampling import AllowedTokens
from server.api.wire import SamplingFields
from server.config import ServeSettings
from server.generation import Ending, GenerationRequest
from server.step import Constraint, SamplingParams


def sequences(
    body: SamplingFields,
    prompt_ids: tuple[int, ...],
    params: Sequence[SamplingParams],
    max_tokens: int,
    *,
    prefix: str,
    first: int,
    endpoint: str,
    streaming: bool,
    settings: ServeSettings,
    tenant: str = "",
    prompt_logprobs: int | None = None,
    shown_special_ids: frozenset[int] = frozenset(),
    constrain: Callable[[], Constraint] | None = None,
    ending: Callable[[], Ending] | None = None,
) -> list[GenerationRequest]:
    """One sequence for each of `params`, with ids `prefix/first` and on; the first computes the prompt all share.

    prompt_logprobs: the first sequence alone reports the scores of the prompt, which are the same for all.
    constrain: makes each sequence's own state of the grammar that they follow. Raises APIError 400 where the body also
        has `allowed_token_ids`: what one permits the other may forbid, which would leave no token to draw.
    settings: they say with whom cached prefixes are shared, and how small a share of the cache may be asked for.
    ending: makes what tells each sequence that its text is complete.
    """
    budget, policy = kv_budget(body, settings)
    salt = body.cache_salt or ""
    if settings.prefix_sharing == "key":
        salt = f"{tenant}\n{salt}"  # no name holds a line's end
    permits: Constraint | None = None  # of all sequences, as it has no state
    if body.allowed_token_ids:
        if constrain is not None:
            raise invalid("allowed_token_ids", "'allowed_token_ids' and structured output cannot be combined.")
        permits = AllowedTokens(body.allowed_token_ids)
    return [
        GenerationRequest(
            request_id=f"{prefix}/{first + i}",
            prompt_ids=prompt_ids,
            params=own,
            max_tokens=max_tokens,
            stop=tuple(body.stop),
            include_stop_str=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_logprobs=None if i else prompt_logprobs,
            leader=f"{prefix}/{first}" if i else None,
            priority=body.priority or 0,
            cache_salt=salt,
            read_cache=body.cache_prompt is not False,
            kv_budget=budget,
            kv_policy=policy,
            constraint=constrain() if constrain is not None else permits,
            ending=ending() if ending is not None else None,
            shown_special_ids=shown_special_ids,
            queue_timeout=body.queue_timeout,
            timeout=body.request_timeout,
            tenant=tenant,
            endpoint=endpoint,
            streaming=streaming,
        )
        for i, own in enumerate(params)
    ]
