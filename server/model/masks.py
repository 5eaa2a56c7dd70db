"""Masks of the constrained samples of a step, made beside its forward pass."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from server.step import ConstraintFailed, GrammarsFailed, Int32Array, SequencesFailed, StepPlan

logger = logging.getLogger(__name__)

_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Masks:
    """The permitted ids of some samples.

    rows: the samples, ascending. bits: int32 [len(rows), ceil(V / 32)], as `server.step.Constraint.fill_mask` writes.
    """

    rows: tuple[int, ...]
    bits: Int32Array


class MaskFiller:
    """Has the constraints of a plan fill their masks on threads of its own, each constraint on one of them.

    A grammar library releases the interpreter's lock while it works, so the masks cost a step nothing as long as they
    take less time than its forward pass.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="sluice-masks")

    def begin(self, plan: StepPlan) -> PendingMasks | None:
        """Start on the plan's masks; None where every sample is free."""
        rows = tuple(row for row, constraint in enumerate(plan.constraints) if constraint is not None)
        if not rows:
            return None
        masks = Masks(rows, np.zeros((len(rows), self._num_words), dtype=np.int32))
        failures: dict[int, _Failure] = {}
        shares = [range(first, len(rows), self._num_threads) for first in range(min(self._num_threads, len(rows)))]
        futures = [self._threads.submit(_fill, plan, masks, share, failures) for share in shares]
        return PendingMasks(plan, masks, failures, futures)


_Failure: TypeAlias = tuple[type[SequencesFailed], str]
"""What to raise, and why."""


def _fill(plan: StepPlan, masks: Masks, share: range, failures: dict[int, _Failure]) -> None:
    for index in share:
        row = masks.rows[index]
        constraint = plan.constraints[row]
        assert constraint is not None
        try:
            constraint.fill_mask(masks.bits[index])
        except ConstraintFailed as error:
            failures[row] = GrammarsFailed, str(error)
        except Exception:  # whatever a grammar library does, the neighbours go on
            logger.exception("a constraint failed")
            failures[row] = SequencesFailed, "the grammar could not be followed (see the server's log)"


class PendingMasks:
    """Masks in the making."""

    def __init__(
        self, plan: StepPlan, masks: Masks, failures: dict[int, _Failure], futures: list[Future[None]]
    ) -> None:
        self._plan = plan
        self._masks = masks
        self._failures = failures
        self._futures = futures

    def settle(self) -> None:
        """Wait until no thread uses a constraint of the plan any more."""
        wait(self._futures)

    def result(self) -> Masks:
        """The masks, once they are made.

        Raises:
            GrammarsFailed: grammars that cannot be followed; all that failed for the same reason as the first.
            SequencesFailed: the same for faults that are not the grammars' own.
        """
        for future in self._futures:
            future.result()
        if self._failures:
            first = self._failures[min(self._failures)]
            rows = sorted(row for row, failure in self._failures.items() if failure == first)
            sequences = tuple(int(self._plan.sample_rows[row]) for row in rows)
            kind, reason = first
            raise kind(f"sequence(s) {', '.join(map(str, sequences))} of the step: {reason}", sequences, reason)
        return self._masks
