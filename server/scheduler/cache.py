"""Which blocks each request has: gives, shares, forgets and takes back. The scheduler decides who may ask.

A request holds a block table for each group of layers. Groups whose layers look back only so far give blocks back that
no further token can see; a request with a budget gives tokens up (see `server.scheduler.budget`); full blocks are
offered to the prefix cache. What that needs of the device before the next step, copies and compactions, is collected
until a plan takes it along.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from server.kvpool.blocks import BlockPool
from server.kvpool.layout import ENDLESS, Visibility, held_blocks
from server.kvpool.prefix import PrefixCache, PrefixNode
from server.kvpool.sizing import longest_within
from server.kvpool.table import BlockTable
from server.reports import HostReport
from server.scheduler.budget import Budget
from server.scheduler.request import Request
from server.step import Compaction, StepResult

_LEARN = 0.2
"""How much the newest measurement counts in a running mean."""


@dataclass(slots=True)
class Chores:
    """What the device has to do before a step; see `StepPlan`."""

    saves: list[tuple[int, int]]
    loads: list[tuple[int, int]]
    compactions: list[Compaction]


class Cache:
    """The pool, the prefix cache and the tables of all requests that run.

    groups: what the layers of each table group see. step_tokens: most tokens of a request that one step computes.
    reserve: whether a request is admitted only if it can come to its end without anybody's being preempted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[Visibility, ...],
        step_tokens: int,
        prefix_caching: bool,
        num_host_blocks: int,
        reserve: bool,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        shares = prefix_caching and can_share(groups, reserve)
        self.prefix = PrefixCache(self.pool, block_size, groups, num_host_blocks) if shares else None
        self.block_size = block_size
        self.groups = groups
        self._limited = [index for index, group in enumerate(groups) if group.reach is not None]
        self.reserve = reserve
        self.evicted_by: Counter[str] = Counter()
        self.kept_tokens: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._most_held = [held_blocks(group, ENDLESS, block_size, step_tokens) for group in groups]
        self._loads: list[tuple[int, int]] = []
        self._compactions: dict[Request, Compaction] = {}
        self._copy_seconds: float | None = None  # of a block, as measured
        self._compute_seconds: float | None = None  # of a token

    def most_blocks(self, request: Request) -> int:
        """Most blocks that the request holds at a time in its life."""
        return self._held(request.max_cached_tokens, request.budget)

    def longest(self, budget: Budget | None = None) -> int:
        """Tokens of the longest sequence with this budget that the whole pool can hold."""

        def held(num_tokens: int) -> int:
            return self._held(num_tokens, budget)

        longest = longest_within(self.pool.capacity, self.block_size, held)
        return ENDLESS if longest is None else longest

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens, without a budget, holds at a time."""
        blocks = -(-num_tokens // self.block_size)
        return sum([min(blocks, most) for most in self._most_held])

    def outstanding_blocks(self, request: Request) -> int:
        """Blocks that a running request may still ask for."""
        return self.most_blocks(request) - request.num_blocks

    def admit(self, request: Request, headroom: int) -> bool:
        """Give a waiting request its blocks if they are there and `headroom` blocks beside them.

        They are those of all its tokens, less what the prefix cache has; with `reserve`, there must be enough for its
        longest life.
        """
        chain = self._match(request)
        start = len(chain) * self.block_size
        tables, hits, missing = [], [], []
        for index, group in enumerate(self.groups):
            table = BlockTable()
            table.start_at(group.first(start) // self.block_size)
            tables.append(table)
            for node in chain[table.first :]:
                if node.blocks[index]:
                    hits.append(node.blocks[index])
                else:
                    missing.append((node, index))
        tokens = min(request.num_tokens + 1, request.max_cached_tokens)
        ends = [self._first_end(index, tokens, start, request) for index in range(len(self.groups))]
        fresh = sum(max(0, end - len(chain)) for end in ends)
        available = self.pool.num_available - sum(self.pool.is_cached(block) for block in hits)
        wanted = self.most_blocks(request) - len(hits) if self.reserve else fresh + len(missing)
        if wanted + headroom > available:
            return False
        self.pool.acquire(hits)  # before allocating, which might otherwise evict them
        request.tables = tables
        request.num_computed = start
        request.num_evicted = 0
        request.num_published = len(chain)
        request.node = chain[-1] if chain else None
        self._fill(tables, chain, missing)
        for table, end in zip(tables, ends, strict=True):
            if end > table.end:
                table.append(self.pool.allocate(end - table.end, after=table.last))
        if request.num_preemptions == 0:
            request.num_cached = start
            self.hit_tokens += start
            if self.prefix is not None and request.uses_cache:
                self.queried_tokens += request.num_prompt
        return True

    def extend(self, request: Request, count: int) -> bool:
        """Make room for the next `count` tokens of a running request; False, with nothing taken, without blocks.

        What it need not see any more is given back first.
        """
        if request.budget is not None and request.num_held == request.budget.most:
            self._compact(request)
        length = request.num_held
        for index in self._limited:
            table = request.tables[index]
            first = self.groups[index].first(length) // self.block_size
            if first > table.first:
                dropped = table.drop_before(first)
                self.pool.release(dropped)
                self.evicted_by["sliding_window"] += len(dropped)
        # Asked of every running request at every step, which seldom needs a block.
        end = -(-(length + count) // self.block_size)
        missing = 0
        for table in request.tables:
            if end > table.end:
                missing += end - table.end
        if not missing:
            return True
        if missing > self.pool.num_available:
            return False
        for table in request.tables:
            if end > table.end:
                table.append(self.pool.allocate(end - table.end, after=table.last))
        return True

    def most_now(self, request: Request) -> int | None:
        """Most tokens that the next step may compute of it, None for any number: no step crosses an eviction, nor the
        end of what an earlier, failed one has added to the scores."""
        if request.budget is None:
            return None
        room = request.budget.most - request.num_held or request.budget.slack
        repeated = request.num_observed - request.num_computed
        return min(room, repeated) if repeated > 0 else room

    def publish(self, request: Request) -> None:
        """Offer the blocks that are full of computed tokens to the prefix cache."""
        prefix, size = self.prefix, self.block_size
        full = request.num_computed // size
        if prefix is None or request.budget is not None or request.num_published >= full:
            return
        prefix.extend_keys(request.keys, request.token_ids[: full * size], request.salt)
        while request.num_published < full:
            index = request.num_published
            tokens = request.token_ids[index * size : (index + 1) * size]
            blocks = [int(table.ids[index]) for table in request.tables]
            node = prefix.publish(request.node, request.keys[index], request.salt, tokens, blocks)
            if node is None:
                request.num_published = len(request.token_ids)  # a key collided: publish no more
                return
            request.node = node
            request.num_published += 1

    def release(self, request: Request) -> None:
        """Give all blocks of a request back."""
        self._compactions.pop(request, None)
        self.pool.release(request.blocks)
        request.tables = []
        request.num_computed = request.num_observed = 0  # num_evicted stays: usage tells it of whoever is over
        request.num_published = 0
        request.node = None

    def take_chores(self) -> Chores:
        """What is to be done before the step that is being planned; it is over when `settle` is called."""
        saves = [] if self.prefix is None else self.prefix.saves
        chores = Chores(saves, self._loads, list(self._compactions.values()))
        for compaction in chores.compactions:  # not before: who is preempted or aborted until now gives nothing up
            kept_blocks = -(-compaction.keep // self.block_size)
            self.evicted_by[compaction.policy] += len(compaction.block_table) - kept_blocks
            self.kept_tokens[compaction.policy] += compaction.keep
            self.dropped_tokens[compaction.policy] += compaction.length - compaction.keep
        if self.prefix is not None:
            self.prefix.saves = []
        self._loads, self._compactions = [], {}
        return chores

    def settle(self) -> None:
        """The step that took the chores along is over."""
        if self.prefix is not None and self.prefix.host is not None:
            self.prefix.host.unpin()

    def learn(self, result: StepResult, num_tokens: int, num_copies: int, *, mostly_prompt: bool) -> None:
        """Note what copying a block and computing a token take, which decides whether host memory is asked."""
        if num_copies:
            self._copy_seconds = _mean(self._copy_seconds, result.copy_seconds / num_copies)
        if mostly_prompt:
            self._compute_seconds = _mean(self._compute_seconds, result.forward_seconds / num_tokens)

    def count_unused(self, request: Request) -> int:
        """Slots in the request's blocks that hold no token of it."""
        size, length = self.block_size, request.num_held
        unused = 0
        for table in request.tables:  # in plain steps: asked of all requests at every step
            unused += table.end * size - max(length, table.first * size)
        return unused

    def host_report(self) -> HostReport | None:
        host = None if self.prefix is None else self.prefix.host
        if host is None:
            return None
        return HostReport(host.capacity, host.num_used, host.num_saved, host.num_loaded, host.num_evicted)

    def check_integrity(self, holders: list[Request]) -> None:
        """Check tables, pool and prefix cache; raises AssertionError. `holders`: all requests that have blocks."""
        self.pool.check_integrity(request.blocks for request in holders)
        if self.prefix is not None:
            self.prefix.check_integrity()
        for request in holders:
            assert len(request.tables) == len(self.groups), "a request lacks a block table"
            for group, table in zip(self.groups, request.tables, strict=True):
                assert table.first <= table.end <= len(table.ids)
                assert not table.ids[: table.first].any(), "a table names blocks that were given back"
                assert request.num_held <= table.end * self.block_size, "tokens were computed into no block"
                seen = group.first(request.num_held) // self.block_size
                assert table.first <= seen, "a block that is still seen was given back"

    def _match(self, request: Request) -> list[PrefixNode]:
        if self.prefix is None or not request.uses_cache:
            return []
        tokens = request.token_ids[: request.num_tokens]
        self.prefix.extend_keys(request.keys, tokens, request.salt)
        chain = self.prefix.match(request.keys, tokens, request.salt, request.chain)
        request.chain = chain
        if self.prefix.host is None:
            return chain
        here = self.prefix.match(request.keys, tokens, request.salt, chain, use_host=False)
        return chain if self._pays(self.prefix, chain, len(chain) - len(here)) else here

    def _pays(self, prefix: PrefixCache, chain: list[PrefixNode], num_more: int) -> bool:
        """Whether copying what only host memory has of `chain` is faster than computing its last `num_more` blocks."""
        if self._copy_seconds is None or self._compute_seconds is None:
            return True
        copies = sum(
            not node.blocks[group]
            for group in range(len(self.groups))
            for node in chain[prefix.first_needed(group, len(chain)) :]
        )
        return copies * self._copy_seconds < num_more * self.block_size * self._compute_seconds

    def _fill(self, tables: list[BlockTable], chain: list[PrefixNode], missing: list[tuple[PrefixNode, int]]) -> None:
        """Enter the blocks of `chain` into the tables, after fetching those that only host memory has."""
        if missing:
            assert self.prefix is not None
            self._loads += self.prefix.restore(missing)
        for index, table in enumerate(tables):
            table.append([node.blocks[index] for node in chain[table.first :]])

    def _compact(self, request: Request) -> None:
        """Have the request's cache shrink to what its budget keeps."""
        budget, (table,) = request.budget, request.tables
        assert budget is not None
        keep = budget.keep
        self._compactions[request] = Compaction(
            table.ids[: table.end].copy(), budget.most, keep, budget.sinks, budget.recent, budget.policy
        )
        self.pool.release(table.drop_from(-(-keep // self.block_size)))
        request.num_evicted += budget.slack

    def _held(self, num_tokens: int, budget: Budget | None) -> int:
        return self.blocks_for(num_tokens if budget is None else min(num_tokens, budget.most))

    def _first_end(self, index: int, tokens: int, start: int, request: Request) -> int:
        """How far a group's table reaches at admission: to the last of `tokens`, or as far as it ever does at a time.

        start: tokens that need not be computed.
        """
        if request.budget is not None:
            tokens = min(tokens, request.budget.most)
        blocks = -(-tokens // self.block_size)
        return min(blocks, self.groups[index].first(start) // self.block_size + self._most_held[index])


def can_share(groups: tuple[Visibility, ...], reserve: bool) -> bool:
    """Whether requests may hold the same blocks.

    A block that one of two holders gives back, since it is out of its sight, leaves nobody a block more; whoever counts
    on every block of a life therefore shares none of those.
    """
    return not (reserve and any(group.reach is not None for group in groups))


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _LEARN * (value - before)
