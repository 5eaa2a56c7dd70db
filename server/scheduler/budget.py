"""How much of its cache a sequence with a budget keeps, and when it gives the rest up.

It holds up to `keep + slack` tokens; when it is there and goes on, `slack` of them are dropped (H2O, arXiv:2306.14048;
StreamingLLM, arXiv:2309.17453). No step crosses that point, so what is dropped when depends on the number of tokens
alone: a sequence computed in other steps, beside others, or once more after it was preempted drops the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.kvpool.layout import ENDLESS
from server.kvpool.sizing import budget_slack
from server.step import EvictionPolicy

SINKS = 4
"""First tokens that always stay: softmax needs somewhere to put attention that nothing deserves."""


@dataclass(frozen=True, slots=True)
class Budget:
    """keep: tokens that stay at each eviction; slack: tokens that may come on top until the next."""

    keep: int
    slack: int
    policy: EvictionPolicy

    @property
    def most(self) -> int:
        return self.keep + self.slack

    @property
    def sinks(self) -> int:
        return min(SINKS, self.keep // 2)

    @property
    def recent(self) -> int:
        """Newest tokens that stay, whatever attention they have had: they have had little time for it."""
        return self.keep // 2


def make_budget(keep: int, policy: EvictionPolicy, block_size: int, longest: int = ENDLESS) -> Budget | None:
    """None where a sequence of at most `longest` tokens never outgrows the budget, so that its cache stays whole."""
    budget = Budget(keep, budget_slack(keep, block_size), policy)
    return budget if longest > budget.most else None
