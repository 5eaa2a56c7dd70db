"""Which host block holds what, against a list in order of use."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.kvpool.tier import HostTier


class TierMachine(RuleBasedStateMachine):
    """`order` is what is held, least recently used first, as (block, held)."""

    @initialize(capacity=st.integers(1, 6))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.forgotten: list[int] = []
        self.tier: HostTier[int] = HostTier(capacity, self.forgotten.append)
        self.order: list[tuple[int, int]] = []
        self.pinned: set[int] = set()
        self.names = self.loads = 0

    @rule()
    def save(self) -> None:
        self.names += 1
        gone = len(self.forgotten)
        block = self.tier.save(self.names)
        if len(self.order) < self.capacity:
            assert block is not None
            assert block not in dict(self.order), "a block was given away that holds something"
            assert self.forgotten[gone:] == []
        else:
            loose = [entry for entry in self.order if entry[0] not in self.pinned]
            if not loose:
                assert block is None
                assert self.forgotten[gone:] == []
                self.names -= 1
                return
            assert (block, self.forgotten[gone:]) == (loose[0][0], [loose[0][1]]), "not what was used longest ago"
            self.order.remove(loose[0])
        assert block is not None
        assert 0 <= block < self.capacity
        self.order.append((block, self.names))
        self.pinned.add(block)

    @precondition(lambda self: self.order)
    @rule(data=st.data(), copied=st.booleans())
    def use(self, data: st.DataObject, copied: bool) -> None:
        entry = data.draw(st.sampled_from(self.order))
        if copied:
            self.tier.load(entry[0])
            self.pinned.add(entry[0])
            self.loads += 1
        else:
            self.tier.touch(entry[0])
        self.order.remove(entry)
        self.order.append(entry)

    @rule()
    def step_is_over(self) -> None:
        self.tier.unpin()
        self.pinned.clear()

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        assert self.tier.num_used == len(self.order)
        counts = (self.tier.num_saved, self.tier.num_loaded, self.tier.num_evicted)
        assert counts == (self.names, self.loads, self.names - len(self.order))


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
