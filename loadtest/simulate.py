"""What the scheduler does with a load, step by step, without a model: `python -m loadtest.simulate`.

Two tables. The first queues the same requests before pools of growing size, under both ways of admission. The second
lets one long prompt arrive among decoding requests, under growing step budgets. A step is one forward pass; how long it
takes depends on the model and is left out. The load is drawn from `--seed`, so the same command prints the same tables.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import Literal

import numpy as np

from server.scheduler.request import Request
from server.scheduler.scheduler import Progress, Scheduler, SchedulerConfig
from server.step import SamplingParams, StepPlan, StepResult

BLOCK_SIZE = 16
MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512
MAX_PROMPT = 512
MAX_TOKENS = 512
MEAN_OUTPUT = 96
VOCAB_SIZE = 50_000
STOP = VOCAB_SIZE  # a token that prompts do not have
LONG_PROMPT = 8_000


def ends_after(tokens: int) -> SamplingParams:
    """Parameters with which `draw` lets an output end after `tokens` tokens; the scheduler does not know when."""
    return SamplingParams(seed=tokens, stop_token_ids=frozenset({STOP}))


def draw(plan: StepPlan) -> StepResult:
    """Stands in for the model: any token, and the stop token when the output has the length it was meant to have."""
    tokens = [
        STOP if index + 1 == params.seed else (7 * params.seed + index) % VOCAB_SIZE
        for params, index in zip(plan.params, plan.out_indices.tolist(), strict=True)
    ]
    return StepResult(np.array(tokens, dtype=np.int64), (None,) * len(tokens), ())


def steps(scheduler: Scheduler) -> Iterator[tuple[StepPlan, list[Progress]]]:
    """Run until nothing is left to do."""
    while (plan := scheduler.plan()) is not None:
        yield plan, scheduler.commit(draw(plan), plan)


def requests(count: int, seed: int) -> list[Request]:
    """Prompts of up to MAX_PROMPT tokens; outputs of MEAN_OUTPUT tokens in the mean, cut at MAX_TOKENS."""
    rng = random.Random(seed)
    load = []
    for index in range(count):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(min(MAX_PROMPT, 16 + int(rng.expovariate(1 / 120))))]
        length = min(MAX_TOKENS, 1 + int(rng.expovariate(1 / MEAN_OUTPUT)))
        load.append(Request(str(index), prompt, ends_after(length), MAX_TOKENS))
    return load


def simulate_pool(num_blocks: int, admission: Literal["optimistic", "reserve"], count: int, seed: int) -> str:
    """One row of the first table."""
    scheduler = Scheduler(
        SchedulerConfig(BLOCK_SIZE, num_blocks, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, admission=admission)
    )
    for request in requests(count, seed):
        scheduler.add(request)
    used = running = computed = taken = 0
    for plan, _ in steps(scheduler):
        stats = scheduler.stats()
        used += stats.blocks_used
        running += plan.num_sequences
        computed += plan.num_tokens
        taken += 1
    stats = scheduler.stats()
    return (
        f"{num_blocks:6} {num_blocks * BLOCK_SIZE:7}  {admission:10} {taken:6} {running / taken:9.1f} "
        f"{used / taken / num_blocks:9.0%} {stats.preemptions:11} {stats.recomputed_tokens / computed:10.1%}"
    )


def simulate_long_prompt(budget: int) -> str:
    """One row of the second table."""
    scheduler = Scheduler(SchedulerConfig(BLOCK_SIZE, 2_000, MAX_NUM_SEQS, budget))
    decoding = [Request(str(index), [index] * 8, ends_after(0), MAX_TOKENS) for index in range(MAX_NUM_SEQS - 1)]
    for request in decoding:
        scheduler.add(request)
    run = steps(scheduler)
    while any(request.is_prefilling for request in decoding):
        next(run)
    long = Request("long", range(LONG_PROMPT), ends_after(1), 1)
    scheduler.add(long)
    taken = largest = skipped = 0
    for plan, progress in run:
        taken += 1
        largest = max(largest, plan.num_tokens)
        skipped += len(decoding) - sum(item.token_id is not None and item.request is not long for item in progress)
        if long.num_outputs:
            break
    return f"{budget:6} {taken:22} {largest:13} {skipped:21}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulate", description="Simulate the scheduler.")
    parser.add_argument("--requests", type=int, default=200, help="how many wait before each pool")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths and the prompts")
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="sizes of the pool")
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens of a step")
    options = parser.parse_args()
    smallest = -(-(MAX_PROMPT + MAX_TOKENS - 1) // BLOCK_SIZE)
    if min(options.blocks) < smallest:
        parser.error(f"--blocks must be at least {smallest}, which the longest request may need")
    if min(options.budgets) < MAX_NUM_SEQS + BLOCK_SIZE:
        parser.error(f"--budgets must be at least {MAX_NUM_SEQS + BLOCK_SIZE}")

    print(
        f"{options.requests} requests, at most {MAX_NUM_SEQS} at once, {MAX_NUM_BATCHED_TOKENS} tokens a step, "
        f"max_tokens {MAX_TOKENS}\n"
    )
    print("blocks  tokens  admission   steps  sequences  occupied  preemptions  recomputed")
    for num_blocks in options.blocks:
        for admission in ("reserve", "optimistic"):
            print(simulate_pool(num_blocks, admission, options.requests, options.seed))
    print(f"\nA prompt of {LONG_PROMPT} tokens among {MAX_NUM_SEQS - 1} decoding requests\n")
    print("budget  steps to its 1st token  largest step  tokens decodes missed")
    for budget in options.budgets:
        print(simulate_long_prompt(budget))


if __name__ == "__main__":
    main()
