"""How much of each sequence stays in the cache: what the request asks for, within what the server allows."""

from __future__ import annotations

from server.api.errors import APIError, invalid
from server.api.wire import DecodingFields
from server.config import ServeSettings
from server.step import EvictionPolicy


def kv_budget(body: DecodingFields, settings: ServeSettings) -> tuple[int | None, EvictionPolicy]:
    """Most tokens of a sequence that stay in the cache, None for all, and which ones those are.

    A budget above the server's own is cut to it. Raises APIError 400 for what this server does not do: budgets without
    --kv-policy, or "h2o" where no scores are kept.
    """
    server_policy = settings.eviction
    if server_policy is None:
        for name in ("kv_budget", "kv_policy"):
            if getattr(body, name) is not None:
                raise _unsupported(name, "this server keeps the whole cache of a request (--kv-policy)")
        return None, "h2o"
    if body.kv_policy == "h2o" and server_policy != "h2o":
        why = f"this server runs with --kv-policy {server_policy} and does not record what is attended to"
        raise _unsupported("kv_policy", f'"h2o" is not to be had: {why}; "window" is')
    least = settings.least_kv_budget
    if body.kv_budget is not None and body.kv_budget < least:
        blocks = f"with blocks of {settings.block_size} (--block-size)"
        raise invalid("kv_budget", f"'kv_budget' must be at least {least} tokens {blocks}; got {body.kv_budget}.")
    budgets = [budget for budget in (body.kv_budget, settings.kv_budget) if budget is not None]
    if body.kv_policy is not None and not budgets:
        raise invalid("kv_policy", "'kv_policy' says what a 'kv_budget' keeps; send that, too.")
    return min(budgets, default=None), body.kv_policy or server_policy


def _unsupported(name: str, why: str) -> APIError:
    return invalid(name, f"'{name}' is not supported: {why}.", "unsupported_parameter")
