"""The ways to keep less of the cache, and a model served with each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from server.kvpool.sizing import most_tokens_held
from server.model.runner import ModelRunner
from server.scheduler.budget import Budget, make_budget
from server.scheduler.request import Request
from server.scheduler.scheduler import Progress, Scheduler, SchedulerConfig
from server.step import EvictionPolicy, SamplingParams, StepPlan

BLOCK_SIZE = 16
STEP_TOKENS = 256
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """How a cache stores numbers, and how much of a sequence it keeps.

    policy: which tokens stay, None for all. share: the budget is the length of the sequences over this.
    """

    name: str
    dtype: str = "float32"
    policy: EvictionPolicy | None = None
    share: int = 1

    def keep(self, length: int) -> int | None:
        """The budget of a sequence of `length` tokens, None for no limit."""
        return None if self.policy is None else length // self.share

    def budget(self, length: int, longest: int) -> Budget | None:
        """That of `keep`, as the scheduler applies it to a sequence that grows to `longest` tokens."""
        keep = self.keep(length)
        if self.policy is None or keep is None:
            return None
        return make_budget(keep, self.policy, BLOCK_SIZE, longest)

    def most_held(self, length: int) -> int:
        """Most tokens of a sequence of `length` that the cache has at a time."""
        return most_tokens_held(length, self.keep(length), BLOCK_SIZE)


FULL = Choice("float32")
SHARES = (2, 4, 8)
CHOICES = (
    FULL,
    Choice("bfloat16", "bfloat16"),
    Choice("float16", "float16"),
    Choice("int8", "int8"),
    Choice("fp8", "fp8"),
    *(Choice(f"H2O, 1/{share}", policy="h2o", share=share) for share in SHARES),
    *(Choice(f"window, 1/{share}", policy="window", share=share) for share in SHARES),
    Choice("int8 and H2O, 1/4", "int8", "h2o", 4),
)


class Served(ModelRunner):
    """The model with the cache of a choice. `logits` [S + P, V] are those of the last step."""

    logits: Tensor

    def __init__(self, model: PreTrainedModel, choice: Choice) -> None:
        """model: stays as it is, and shares its weights."""
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(model, shared)
        super().__init__(twin, "auto", BLOCK_SIZE, cache_dtype=choice.dtype, scored=choice.policy == "h2o")

    def compute_logits(self, plan: StepPlan) -> Tensor:
        self.logits = super().compute_logits(plan)
        return self.logits

    def scheduler(self, requests: Sequence[Request]) -> Scheduler:
        """One that has these requests in its queue, and a pool, new and empty, that holds all of them at once."""
        lengths = [
            request.max_cached_tokens if request.budget is None else min(request.max_cached_tokens, request.budget.most)
            for request in requests
        ]
        # Admission leaves a block free in each group for each request that runs.
        spare = len(requests) * len(self.layout.groups)
        num_blocks = spare + sum(self.layout.blocks_for(length, STEP_TOKENS) for length in lengths)
        scheduler = Scheduler(
            SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_num_seqs=len(requests),
                max_num_batched_tokens=STEP_TOKENS,
                prefix_caching=False,
                groups=tuple(group.visibility for group in self.layout.groups),
            )
        )
        self.allocate(num_blocks + 1)
        for request in requests:
            scheduler.add(request)
        return scheduler

    def steps(self, scheduler: Scheduler) -> Iterator[tuple[StepPlan, list[Progress]]]:
        """Compute until nothing is left to do."""
        while (plan := scheduler.plan()) is not None:
            yield plan, scheduler.commit(self.run(plan), plan)
