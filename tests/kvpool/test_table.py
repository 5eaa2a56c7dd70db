"""A block table against a dictionary of columns."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.kvpool.blocks import TRASH_BLOCK
from server.kvpool.table import BlockTable


class TableMachine(RuleBasedStateMachine):
    """`columns` is what the table holds; columns before `first` have been given back."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable()
        self.columns: dict[int, int] = {}
        self.first = self.end = 0
        self.names = 0

    @precondition(lambda self: self.end == 0)
    @rule(first=st.integers(0, 9))
    def start_at(self, first: int) -> None:
        self.table.start_at(first)
        self.first = self.end = first

    @rule(count=st.integers(0, 5))
    def append(self, count: int) -> None:
        blocks = [self.names + index + 1 for index in range(count)]
        self.names += count
        self.table.append(blocks)
        self.columns |= {self.end + index: block for index, block in enumerate(blocks)}
        self.end += count

    @rule(first=st.integers(0, 30))
    def drop_before(self, first: int) -> None:
        dropped = self.table.drop_before(first)
        assert dropped == [self.columns.pop(column) for column in sorted(self.columns) if column < first]
        self.first = max(self.first, min(first, self.end))

    @precondition(lambda self: self.end > self.first)
    @rule(data=st.data())
    def drop_from(self, data: st.DataObject) -> None:
        end = data.draw(st.integers(self.first, self.end))
        dropped = self.table.drop_from(end)
        assert dropped == [self.columns.pop(column) for column in sorted(self.columns) if column >= end]
        self.end = end

    @invariant()
    def agrees(self) -> None:
        table = self.table
        assert (table.first, table.end) == (self.first, self.end)
        assert table.blocks == [self.columns[column] for column in sorted(self.columns)]
        assert table.last == self.columns.get(self.end - 1)
        assert len(table.ids) >= table.end
        for column, block in enumerate(table.ids.tolist()):
            assert block == self.columns.get(column, TRASH_BLOCK), "what is out of sight is not the trash block"


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
