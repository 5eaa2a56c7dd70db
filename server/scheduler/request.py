"""A sequence as the scheduler sees it: its tokens, how far they are computed, and the blocks it holds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import zip_longest

import numpy as np

from server.kvpool.blocks import TRASH_BLOCK
from server.kvpool.prefix import PrefixNode
from server.kvpool.table import BlockTable
from server.scheduler.budget import Budget
from server.step import Constraint, Int64Array, SamplingParams


class Status(Enum):
    """WAITING in the queue (also after a preemption), RUNNING with blocks and a place in the batch, or FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence to continue.

    There are no phases: `num_computed` chases `num_tokens`. A request that still has prompt to compute and one that
    decodes differ only in how far it is behind.

    max_tokens: most tokens to generate; 0 computes the prompt only.
    prompt_logprobs: None, or how many top tokens to report at each prompt position; such a request does not read the
        prefix cache, since cached positions have no logits.
    constraint: the grammar that the output follows; the scheduler only hands it on.
    read_cache: whether it may use blocks that others computed; its own are offered to them all the same.
    budget: how much of its cache it keeps, None for all; with one, it neither uses nor offers blocks.
    leader: a sibling with the same prompt which is to compute it first, so that this one finds it in the prefix cache.
    followers: the siblings whose leader it is, until it is over; kept by the scheduler.
    tenant: whom its tokens are counted for, where the batch is shared fairly.
    order: who goes first in the batch, and whoever is last by it is preempted first; set by the scheduler.
    """

    __slots__ = (
        "arrival", "budget", "chain", "constraint", "followers", "keys", "leader", "max_tokens", "node",
        "num_cached", "num_computed", "num_evicted", "num_lost", "num_observed", "num_overtaken",
        "num_preemptions", "num_prompt", "num_published", "num_scored", "num_tokens", "order", "params",
        "priority", "prompt_logprobs", "read_cache", "request_id", "salt", "status", "tables", "tenant",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int,
        *,
        priority: int = 0,
        salt: str = "",
        read_cache: bool = True,
        budget: Budget | None = None,
        prompt_logprobs: int | None = None,
        leader: Request | None = None,
        constraint: Constraint | None = None,
        tenant: str = "",
    ) -> None:
        if not len(prompt_ids):
            raise ValueError("a prompt needs at least one token")
        self.request_id = request_id
        self.params = params
        self.max_tokens = max_tokens
        self.priority = priority
        self.salt = salt
        self.read_cache = read_cache
        self.budget = budget
        self.prompt_logprobs = prompt_logprobs
        self.leader = leader
        self.followers: list[Request] = []
        self.constraint = constraint
        self.tenant = tenant
        self.arrival = -1  # set by the scheduler
        self.order = (priority, self.arrival)

        self.num_prompt = len(prompt_ids)
        self.num_tokens = self.num_prompt
        self.token_ids: Int64Array = np.empty(self.num_prompt + max_tokens, dtype=np.int64)
        self.token_ids[: self.num_prompt] = prompt_ids

        self.status = Status.WAITING
        self.num_computed = 0  # tokens whose K and V are in the pool
        self.num_evicted = 0  # of them, tokens that its budget has made it give up since
        self.num_observed = 0  # computed tokens whose attention is in the scores already, of a step that failed
        self.tables: list[BlockTable] = []  # one for each group of layers, while it runs
        self.keys: list[bytes] = []  # prefix-cache keys of the full blocks of token_ids, as far as needed
        self.chain: list[PrefixNode] = []  # what the prefix cache had of it when it was last looked up
        self.node: PrefixNode | None = None  # the last published block of this sequence's chain
        self.num_published = 0  # full blocks offered to the prefix cache
        self.num_scored = 0  # prompt positions whose log-probability has been reported
        self.num_cached = 0  # prompt tokens found in the prefix cache at the first admission
        self.num_preemptions = 0
        self.num_overtaken = 0  # requests that started before it while it waited for blocks
        self.num_lost = 0  # tokens that were computed when it was last preempted

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens this request ever has in the pool: the last one generated is never written."""
        return self.num_prompt + max(0, self.max_tokens - 1)

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be computed."""
        return self.num_computed < self.num_tokens - 1 or self.num_tokens == self.num_prompt

    @property
    def prompt_is_computed(self) -> bool:
        return self.num_computed >= self.num_prompt

    @property
    def is_scored(self) -> bool:
        """Whether all prompt positions to be scored have been."""
        return self.prompt_logprobs is None or self.num_scored >= self.num_prompt - 1

    @property
    def num_held(self) -> int:
        """Tokens that its cache holds, as each layer without a window sees them."""
        return self.num_computed - self.num_evicted

    @property
    def uses_cache(self) -> bool:
        """Whether it may take blocks from the prefix cache, now."""
        return self.read_cache and self.budget is None and self.is_scored

    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks it holds, in the order of its tokens, those of all groups for each."""
        columns = zip_longest(*(table.ids[: table.end].tolist() for table in self.tables), fillvalue=TRASH_BLOCK)
        return [block for column in columns for block in column if block != TRASH_BLOCK]

    @property
    def num_blocks(self) -> int:
        return sum(table.end - table.first for table in self.tables)

    @property
    def output_ids(self) -> Int64Array:
        return self.token_ids[self.num_prompt : self.num_tokens]

    def append_token(self, token_id: int) -> None:
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
