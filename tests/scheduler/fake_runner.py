"""A runner without a model that believes nothing a plan says.

It keeps a shadow of the pool and of host memory: for each slot the group of layers, token and position written there
and a 64-bit hash that stands for the K and V a model would have stored (see `alone`). Before a step it checks that
every slot the step attends to holds exactly what it should, so a block that was shared, evicted, preempted, copied or
published wrongly is noticed when it is read, and that no table names blocks out of sight. What a request generates
alone is what it must generate in any company.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from server.kvpool.blocks import TRASH_BLOCK
from server.kvpool.layout import EVERYTHING
from server.scheduler.scheduler import SchedulerConfig
from server.step import Compaction, StepPlan, StepResult, TokenLogprobs
from tests.kvpool.kept import kept_tokens
from tests.scheduler.alone import EMPTY, VOCAB_SIZE, draw, extend_history, score

_ATTENTION = np.uint64(0xD6E8FEB86659FD93)
_ODD = np.arange(1, 2**16, 2, dtype=np.uint64)


def _extend_histories(histories: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    x = histories ^ ((tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _blend(views: list[npt.NDArray[np.uint64]]) -> int:
    total = 0
    for view in views:
        total = extend_history(total, len(view))
        total = (total + int((view * _ODD[: len(view)]).sum(dtype=np.uint64))) & (2**64 - 1)
    return total


class Shadow:
    """What each slot of a memory of blocks holds: one number for each, [blocks, block_size]; -1 for nothing."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size)
        self.groups = np.full(shape, -1, dtype=np.int64)
        self.tokens = np.full(shape, -1, dtype=np.int64)
        self.positions = np.full(shape, -1, dtype=np.int64)
        self.histories = np.zeros(shape, dtype=np.uint64)

    def copy_from(self, other: Shadow, source: int, target: int) -> None:
        """Copy a full block of consecutive tokens of one group."""
        group, position, size = other.groups[source, 0], other.positions[source, 0], self.positions.shape[1]
        assert group >= 0, "an empty block is copied"
        assert position % size == 0, "what is copied is no block of a text"
        assert (other.groups[source] == group).all(), "a block of several groups is copied"
        assert (other.positions[source] == position + np.arange(size)).all(), "a block that is not full is copied"
        for name in ("groups", "tokens", "positions", "histories"):
            getattr(self, name)[target] = getattr(other, name)[source]

    def forget(self, block: int) -> None:
        self.groups[block] = self.positions[block] = self.tokens[block] = -1


class FakeRunner:
    """Runs plans over a shadow pool of the configured size and the trash block; a wrong plan is an AssertionError.

    attention: what each slot has received. num_saved, num_loaded: blocks copied to and from host memory.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.groups = config.groups
        self.pool = Shadow(config.num_blocks + 1, config.block_size)
        self.host = Shadow(config.num_host_blocks, config.block_size)
        self.num_saved = self.num_loaded = 0
        self._sees_all = EVERYTHING in config.groups
        self.attention = np.zeros((config.num_blocks + 1) * config.block_size, dtype=np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        self._check_shapes(plan)
        self._move(plan)
        counts = np.diff(plan.query_starts)
        rows = np.repeat(np.arange(plan.num_sequences), counts)
        starts = plan.context_lens - counts
        assert (starts >= 0).all(), "a sequence computes more tokens than its context has"
        index = np.arange(plan.num_tokens) - np.repeat(plan.query_starts[:-1] - starts, counts)
        evicted = (plan.positions - index)[plan.query_starts[:-1]]
        assert (plan.positions == index + evicted[rows]).all(), "the positions of a sequence are not contiguous"
        assert (evicted >= 0).all(), "a sequence has more in its cache than it has computed"
        assert not evicted.any() or self.groups == (EVERYTHING,), "a sequence with windows gave tokens up"

        views = self._look(plan, starts, evicted)
        histories = self._write(plan, starts, evicted, views)
        self._observe(plan, starts)
        return self._result(plan, histories)

    def _check_shapes(self, plan: StepPlan) -> None:
        tokens, sequences, samples = plan.num_tokens, plan.num_sequences, len(plan.sample_rows)
        assert tokens >= sequences >= 1
        assert plan.input_ids.shape == plan.positions.shape == (tokens,)
        assert plan.slots.shape == (len(self.groups), tokens)
        assert plan.query_starts.shape == (sequences + 1,)
        assert plan.query_starts[0] == 0
        assert plan.query_starts[-1] == tokens
        assert (np.diff(plan.query_starts) >= 1).all(), "a sequence without tokens is in the plan"
        assert (np.diff(plan.query_starts)[: plan.num_decodes] == 1).all(), "the first sequences are not the decodes"
        assert set(range(plan.num_decodes)) <= set(plan.sample_rows.tolist()), "a decode does not sample"
        assert plan.block_tables.shape[:2] == (len(self.groups), sequences)
        assert plan.block_tables.shape[2] * self.block_size >= plan.context_lens.max(), "a block table is too short"
        assert (plan.block_tables >= 0).all()
        assert (plan.block_tables <= self.num_blocks).all()
        for name in ("input_ids", "positions", "slots", "logit_indices", "out_indices", "score_targets"):
            assert getattr(plan, name).dtype == np.int64, name
        for name in ("query_starts", "context_lens", "block_tables", "sample_rows", "score_rows"):
            assert getattr(plan, name).dtype == np.int32, name
        assert ((plan.input_ids >= 0) & (plan.input_ids < VOCAB_SIZE)).all(), "a token was never drawn or given"
        assert len(plan.out_indices) == len(plan.params) == len(plan.histories) == samples
        assert len(plan.score_targets) == len(plan.score_tops) == len(plan.score_rows)
        assert len(plan.logit_indices) == samples + len(plan.score_rows)
        assert (np.diff(plan.sample_rows) >= 1).all(), "a sequence is sampled twice in a step"
        assert (plan.logit_indices[:samples] == plan.query_starts[plan.sample_rows + 1] - 1).all()
        if len(plan.score_rows):
            scored = plan.logit_indices[samples:]
            assert (np.diff(plan.score_rows) >= 0).all()
            assert (np.diff(scored) >= 1).all(), "a position is scored twice in a step"
            assert (plan.query_starts[plan.score_rows] <= scored).all()
            assert (scored < plan.query_starts[plan.score_rows + 1]).all()

    def _move(self, plan: StepPlan) -> None:
        """What is to be done before the pass, in the order that `StepPlan` promises."""
        saved, loaded = [host for _, host in plan.saves], [block for _, block in plan.loads]
        assert len(set(saved)) == len(saved), "a host block is saved to twice in a step"
        assert len(set(loaded)) == len(loaded), "two blocks are loaded to one"
        assert not set(loaded) & set((plan.slots // self.block_size).ravel().tolist()), "a loaded block is written"
        for block, host in plan.saves:
            self.host.copy_from(self.pool, block, host)
        for block, _ in plan.saves:
            self.pool.forget(block)  # it was saved because it is wanted for something else
        for compaction in plan.compactions:
            self._compact(compaction)
        for host, block in plan.loads:
            self.pool.copy_from(self.host, host, block)
        self.num_saved += len(plan.saves)
        self.num_loaded += len(plan.loads)

    def _compact(self, compaction: Compaction) -> None:
        assert self.groups == (EVERYTHING,), "a sequence with windows gives tokens up"
        size, length, keep = self.block_size, compaction.length, compaction.keep
        assert len(compaction.block_table) == -(-length // size), "the table of a compaction is not that of its tokens"
        assert len(set(compaction.block_table.tolist())) == len(compaction.block_table)
        assert 0 <= compaction.sinks <= compaction.sinks + compaction.recent <= keep < length
        index = np.arange(length)
        slots = compaction.block_table[index // size].astype(np.int64) * size + index % size
        assert (slots >= size).all(), "the trash block is compacted"
        pool, positions = self.pool, self.pool.positions.ravel()
        assert (np.diff(positions[slots], prepend=-1) > 0).all(), "what is compacted is no sequence"
        kept = slots[kept_tokens(self.attention[slots].tolist(), compaction)]
        for column in (pool.groups.ravel(), pool.tokens.ravel(), positions, pool.histories.ravel(), self.attention):
            column[slots[:keep]] = column[kept]
        positions[slots[keep:]] = -1

    def _look(
        self, plan: StepPlan, starts: npt.NDArray[np.int32], evicted: npt.NDArray[np.int64]
    ) -> list[list[npt.NDArray[np.uint64]]]:
        """For each sequence and group the hashes of what the first query sees before itself, after they are checked."""
        size, pool = self.block_size, self.pool
        groups, positions = pool.groups.ravel(), pool.positions.ravel()
        tokens, histories = pool.tokens.ravel(), pool.histories.ravel()
        writer = np.full(self.num_blocks + 1, -1, dtype=np.int64)
        sequences = np.arange(plan.num_sequences)
        rows = np.repeat(sequences, np.diff(plan.query_starts))
        for group, slots in enumerate(plan.slots):
            writer[slots // size] = rows * len(self.groups) + group
        for group, slots in enumerate(plan.slots):
            owners = rows * len(self.groups) + group
            assert (writer[slots // size] == owners).all(), "a block is written by two sequences, or for two groups"
        assert len(np.unique(plan.slots)) == plan.slots.size, "a slot is written twice"

        views: list[list[npt.NDArray[np.uint64]]] = [[] for _ in sequences]
        last = np.zeros(plan.num_sequences, dtype=np.uint64)
        for group, visibility in enumerate(self.groups):
            firsts = np.array([visibility.first(start) for start in starts.tolist()])
            table = plan.block_tables[group]
            hidden = np.arange(table.shape[1]) < (firsts // size)[:, None]
            assert not table[hidden].any(), "a table names a block out of sight"
            lengths = plan.context_lens - firsts
            ends = np.cumsum(lengths, dtype=np.int64)
            owner = np.repeat(sequences, lengths)
            index = np.arange(ends[-1]) - np.repeat(ends - lengths - firsts, lengths)
            blocks = table[owner, index // size].astype(np.int64)
            assert (blocks != TRASH_BLOCK).all(), "a sequence keeps tokens in the trash block"
            slots = blocks * size + index % size
            is_new = index >= starts[owner]
            assert (plan.slots[group] == slots[is_new]).all(), "a token is written where its sequence will not look"
            writers = writer[blocks]
            own = owner * len(self.groups) + group
            assert ((writers == -1) | (writers == own)).all(), "a block is written while another sequence reads it"

            owner, index, slots = owner[~is_new], index[~is_new], slots[~is_new]
            assert (groups[slots] == group).all(), "a slot is read that holds what other layers stored, or nothing"
            whole = evicted[owner] == 0
            assert (positions[slots] == index)[whole].all(), "a slot is read that holds another position, or nothing"
            assert (positions[slots] >= index).all(), "a slot is read that holds nothing"
            assert (np.diff(positions[slots]) > 0)[np.diff(owner) == 0].all(), "what is kept is out of order"
            held = histories[slots]
            if self._sees_all:
                previous = np.empty(len(slots), dtype=np.uint64)
                previous[1:] = held[:-1]
                previous[index == 0] = EMPTY
                known = whole & ((index > firsts[owner]) | (index == 0))
                agrees = held == _extend_histories(previous, tokens[slots])
                assert agrees[known].all(), "a slot holds another prompt's history"
                newest = slots[index == starts[owner] - 1]
                of = owner[index == starts[owner] - 1]
                assert ((last[of] == 0) | (last[of] == histories[newest])).all(), "two groups hold different texts"
                last[of] = histories[newest]
            for row, view in enumerate(np.split(held, np.searchsorted(owner, sequences[1:]))):
                views[row].append(view)
        return views

    def _write(
        self,
        plan: StepPlan,
        starts: npt.NDArray[np.int32],
        evicted: npt.NDArray[np.int64],
        views: list[list[npt.NDArray[np.uint64]]],
    ) -> list[int]:
        """Store the step's tokens; returns the hash of each."""
        histories: list[int] = []
        tokens, positions = plan.input_ids.tolist(), plan.positions.tolist()
        bounds = plan.query_starts.tolist()
        for row, start in enumerate(starts.tolist()):
            if self._sees_all and not evicted[row]:
                full = max(views[row], key=len)
                history = int(full[-1]) if start else EMPTY
                for token in tokens[bounds[row] : bounds[row + 1]]:
                    history = extend_history(history, token)
                    histories.append(history)
                continue
            seen = views[row]
            for offset, at in enumerate(range(bounds[row], bounds[row + 1])):
                query = start + offset
                before = [query - group.first(query) for group in self.groups]
                now = [view[len(view) - count :] for count, view in zip(before, seen, strict=True)]
                history = extend_history(extend_history(_blend(now), positions[at]), tokens[at])
                histories.append(history)
                seen = [np.append(view, np.uint64(history)) for view in seen]
        pool = self.pool
        for group, slots in enumerate(plan.slots):
            pool.groups.ravel()[slots] = group
            pool.tokens.ravel()[slots] = plan.input_ids
            pool.positions.ravel()[slots] = plan.positions
            pool.histories.ravel()[slots] = np.array(histories, dtype=np.uint64)
        return histories

    def _observe(self, plan: StepPlan, starts: npt.NDArray[np.int32]) -> None:
        """Add what the queries of observed sequences attend to the scores of what they see."""
        if plan.observed is None:
            return
        assert plan.observed.shape == (plan.num_sequences,)
        histories = self.pool.histories.ravel()
        for row in np.flatnonzero(plan.observed).tolist():
            new = plan.slots[0, plan.query_starts[row] : plan.query_starts[row + 1]]
            self.attention[new] = 0
            index = np.arange(plan.context_lens[row])
            blocks = plan.block_tables[0, row][index // self.block_size].astype(np.int64)
            slots = blocks * self.block_size + index % self.block_size
            weights = ((histories[new][:, None] ^ histories[slots]) * _ATTENTION) >> np.uint64(44)
            weights[index > (starts[row] + np.arange(len(new)))[:, None]] = 0
            self.attention[slots] += weights.sum(axis=0).astype(np.int64)

    def _result(self, plan: StepPlan, histories: list[int]) -> StepResult:
        samples = len(plan.sample_rows)
        indices = plan.logit_indices.tolist()
        token_ids = [
            draw(histories[index], params, out_index)
            for index, params, out_index in zip(indices[:samples], plan.params, plan.out_indices.tolist(), strict=True)
        ]
        scores = tuple(
            TokenLogprobs(target, score(histories[index], target))
            for index, target in zip(indices[samples:], plan.score_targets.tolist(), strict=True)
        )
        # Whether a copy is faster than computing its block changes every few steps.
        copies = (len(plan.saves) + len(plan.loads)) * (0.1, 20.0)[plan.step // 40 % 2]
        return StepResult(
            np.array(token_ids, dtype=np.int64),
            (None,) * samples,
            scores,
            forward_seconds=float(plan.num_tokens),
            copy_seconds=copies,
        )
