"""Every server does the same work once a turn, alone on the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.compare.peers import Peer
from server.bench.client import BenchError, Client
from server.bench.load import Limits, closed_loop, model_of, probe
from server.bench.report import Level, summarize
from server.bench.workload import Workload

SETTLE_SECONDS = 0.5  # until what the last server left running is asleep


@dataclass(frozen=True, slots=True)
class Work:
    """What each server does in each turn; see the options of the command.

    run: starts the tag of every prompt, new in each run.
    """

    prompts: Sequence[str]
    concurrency: Sequence[int]
    requests: int | None
    output_tokens: int
    warmup: int
    seed: int
    run: str
    timeout: float
    api_key: str | None

    def workload(self, model: str, turn: int) -> Workload:
        """The same prompts in the same order for all servers of a turn, and new to any cache in the next one."""
        return Workload(self.prompts, model, self.output_tokens, f"{self.run}.{turn}", seed=self.seed)

    @property
    def loads(self) -> list[str]:
        """Their names, in the order in which they are applied."""
        return [f"{number} client" + "s" * (number > 1) for number in self.concurrency]

    def limits(self, concurrency: int) -> Limits:
        return Limits(self.requests or max(8, 3 * concurrency))


@dataclass(slots=True)
class Side:
    """What became of one server.

    turns: the levels of each turn, one a load; None where it did not come that far.
    refused: fields of requests that it does not take, so that it was measured without.
    failure: why it was given up, None while it is well.
    """

    name: str
    peer: Peer | None = None
    version: str = "unknown"
    turns: list[list[Level] | None] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it was given up or any request failed."""
        return self.failure is not None or any(level.failures for turn in self.turns for level in turn or ())


async def take_turns(sides: Sequence[Side], work: Work, turns: int, show: Callable[[str], None]) -> None:
    """Let the servers work, each alone, in an order that moves on by one from turn to turn.

    One that cannot be started, dies, or takes no request is given up with its reason, and the others go on.
    """
    for turn in range(turns):
        first = turn % len(sides)
        for side in (*sides[first:], *sides[:first]):
            levels = None
            if side.peer is not None and side.failure is None:
                show(f"turn {turn + 1} of {turns}: {side.name}")
                try:
                    levels = await _turn(side, side.peer, work, turn, show)
                except BenchError as error:
                    side.failure = f"turn {turn + 1}: {error}"
                    show(f"{side.name} failed")
                await asyncio.sleep(SETTLE_SECONDS)
            side.turns.append(levels)


async def _turn(side: Side, peer: Peer, work: Work, turn: int, show: Callable[[str], None]) -> list[Level]:
    """All loads on a server that is started for them. Raises BenchError where it cannot be measured."""
    async with peer.serving(lambda text: show(f"{side.name}: {text}")) as url:
        client = Client(url, work.api_key if peer.url else None, work.timeout, done_event=peer.done_event)
        workload = work.workload(await model_of(client), turn)
        side.refused = await probe(client, workload)
        if peer.endless and "ignore_eos" in side.refused:
            workload.extras = {**workload.extras, **peer.endless}
            side.refused.remove("ignore_eos")
        if work.warmup:
            warm = await closed_loop(client, workload, max(work.concurrency), Limits(work.warmup))
            if failure := next((record.failure for record in warm.records if record.failure), None):
                raise BenchError(f"a request of the warm-up failed: {failure}")
        levels = []
        for number, name in zip(work.concurrency, work.loads, strict=True):
            show(f"{side.name}: {name}")
            levels.append(summarize(name, await closed_loop(client, workload, number, work.limits(number))))
        return levels
