"""What the panels must show, by the clients' own count.

A count is exact, except for what a client cannot know: how many tokens the server still computed for one that had gone
away. A latency lies within a bucket's width of what the client measured, who also waited for the connection, for his
own turn at a CPU that server and clients share, and for the answer's way back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from loadtest.panels.traffic import Outcome, Scale
from server.reports import ENDPOINTS, FINISH_REASONS, AbortCause, RejectReason
from server.step import EvictionPolicy

How: TypeAlias = Literal["total", "overall", "peak", "surge", "last"]
Key: TypeAlias = tuple[str, str]

LATENCY_BUCKET = 1.8
LENGTH_BUCKET = 2.0
"""Factors from bound to bound of the server's histograms (server/metrics/families.py)."""
LAG_SECONDS = 0.15
UNSEEN_TOKENS = 8
TOGETHER = 0.6
"""Of the sum of the replicas' highest values, the least that a scrape sees at one moment: more than one of two has."""
ALL = "*"
"""Stands for the sum of a query's series."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Bounds of what a series shows.

    how: "total" is its rate over the whole load times the load's seconds, "overall" its value when the whole load is
        one rate interval, "peak" and "last" are of its course, "surge" is the peak of one that begins and ends at 0.
    """

    how: How
    low: float
    high: float


def total(low: float, high: float | None = None) -> Expected:
    return Expected("total", low, low if high is None else high)


def overall(value: float) -> Expected:
    return Expected("overall", value, value)


def constant(value: float) -> Expected:
    return Expected("peak", value, value)


class Truth:
    """What the clients of `servers` servers counted together: `outcomes` are all of their requests."""

    def __init__(self, outcomes: Sequence[Outcome], scale: Scale, servers: int) -> None:
        self._outcomes = outcomes
        self._scale = scale
        self._servers = servers
        self._ended = [outcome for outcome in outcomes if outcome.end != "refused"]
        self._ends = Counter(outcome.end for outcome in self._ended)
        self._causes = Counter(outcome.cause for outcome in self._ended if outcome.cause)
        self._refusals = Counter(outcome.cause for outcome in outcomes if outcome.end == "refused")

    # Counts

    @property
    def answered(self) -> int:
        return self._ends["stop"] + self._ends["length"]

    @property
    def _unanswered(self) -> int:
        """By fault of the server, in which those count that it had no time for."""
        return self._causes["queue_timeout"] + self._causes["deadline_empty"]

    def met(self) -> Expected:
        """How many met both objectives: of some the client cannot tell, whose latencies are near them."""
        judged = [self._met(outcome) for outcome in self._ended if outcome.end in ("stop", "length")]
        return total(judged.count(True), len(judged) - judged.count(False))

    def missed(self) -> Expected:
        """The others, and those whose time ran out."""
        judged = self.answered + self._unanswered + self._causes["deadline"]
        return total(judged - self.met().high, judged - self.met().low)

    def goodput(self) -> Expected:
        judged = self.answered + self._unanswered + self._causes["deadline"]
        return Expected("overall", self.met().low / judged, self.met().high / judged)

    def _met(self, outcome: Outcome) -> bool | None:
        record, objectives = outcome.record, self._scale.objectives
        if record.ttft is None or record.e2e is None:  # a stop string that came first leaves nothing to see
            return None
        gaps = max(1, record.output_tokens - 1)
        gap, lag = (record.e2e - record.ttft) / gaps, LAG_SECONDS / gaps
        if record.ttft <= objectives.ttft_seconds and gap <= objectives.inter_token_seconds - lag:
            return True
        if record.ttft - LAG_SECONDS > objectives.ttft_seconds or gap - lag > objectives.inter_token_seconds:
            return False
        return None

    @property
    def error_ratio(self) -> float:
        return self._unanswered / (self._unanswered + self.answered)

    @property
    def refused_ratio(self) -> float:
        return self._refusals["queue_full"] / len(self._outcomes)

    @property
    def prompt_tokens(self) -> int:
        return sum(outcome.record.prompt_tokens or 0 for outcome in self._ended)

    @property
    def cached_tokens(self) -> int:
        return sum(outcome.record.cached_tokens or 0 for outcome in self._ended)

    @property
    def generated(self) -> Expected:
        seen = sum(outcome.record.completion_tokens or 0 for outcome in self._ended)
        return total(seen, seen + UNSEEN_TOKENS * self._causes["disconnect"])

    # What the cache gives up

    def _compactions(self, policy: EvictionPolicy) -> int:
        """How often requests with a budget were cut. One holds up to budget and slack, and drops the slack whenever it
        holds both and has a further token to compute, which its last token is not."""
        budget, slack = self._scale.budget, self._scale.slack
        count = 0
        for outcome in self._ended:
            if outcome.policy == policy:
                computed = (outcome.record.prompt_tokens or 0) + (outcome.record.completion_tokens or 0) - 1
                count += max(0, math.ceil((computed - budget - slack) / slack))
        return count

    def budget_tokens(self) -> dict[str, Expected]:
        """By policy and outcome."""
        kept = {f"{policy} kept": self._scale.budget * self._compactions(policy) for policy in get_args(EvictionPolicy)}
        dropped = {
            f"{policy} dropped": self._scale.slack * self._compactions(policy) for policy in get_args(EvictionPolicy)
        }
        return {name: total(count) for name, count in (kept | dropped).items()}

    def evicted_blocks(self) -> dict[str, Expected]:
        """By cause. Of cached blocks the clients know of those alone that came back."""
        blocks = self._scale.slack // self._scale.block_tokens
        by_policy = {policy: total(blocks * self._compactions(policy)) for policy in get_args(EvictionPolicy)}
        return by_policy | {"prefix_lru": total(self.returned_blocks, math.inf), "sliding_window": total(0)}

    @property
    def returned_blocks(self) -> int:
        """Of the prompts whose beginning had left the device."""
        tokens = sum(outcome.record.cached_tokens or 0 for outcome in self._ended if outcome.returned)
        return tokens // self._scale.block_tokens

    def within_a_request(self, with_budget: bool) -> Expected:
        """Of a part of a step: no longer than the longest request, with a budget or whichever, whose step it was."""
        longest = max(o.record.e2e or 0.0 for o in self._ended if o.policy or not with_budget)
        return Expected("overall", 0, longest * LATENCY_BUCKET)

    def received(self) -> dict[str, Expected]:
        kinds = Counter((outcome.endpoint, outcome.streaming) for outcome in self._outcomes)
        return {
            f"{endpoint}, streaming {'true' if streaming else 'false'}": total(kinds[endpoint, streaming])
            for endpoint in ENDPOINTS
            for streaming in (True, False)
        }

    # Latencies and lengths

    def ttft(self, share: float) -> Expected:
        return _near((o.record.ttft for o in self._ended), share, LATENCY_BUCKET, LAG_SECONDS)

    def end_to_end(self, share: float) -> Expected:
        return _near((o.record.e2e for o in self._ended), share, LATENCY_BUCKET, LAG_SECONDS)

    def gap(self, share: float) -> Expected:
        gaps = (float(gap) for o in self._ended for gap in o.record.chunk_gaps())
        return _near(gaps, share, LATENCY_BUCKET, LAG_SECONDS)

    def per_token(self, share: float) -> Expected:
        """The mean gap of each request with two tokens or more."""
        means = (
            (o.record.arrivals[-1] - o.record.arrivals[0]) / (len(o.record.arrivals) - 1)
            for o in self._ended
            if len(o.record.arrivals) > 1
        )
        return _near(means, share, LATENCY_BUCKET, LAG_SECONDS)

    def prompt_length(self, share: float) -> Expected:
        known = (o.record.prompt_tokens for o in self._ended if o.cause != "queue_timeout")
        return _near(known, share, LENGTH_BUCKET)

    def output_length(self, share: float) -> Expected:
        return _near((o.record.completion_tokens or 0 for o in self._ended), share, LENGTH_BUCKET, UNSEEN_TOKENS)

    # Panels

    def summed(self) -> dict[Key, Expected]:
        """By title and series, of the dashboard that sums over the replicas."""
        expected: dict[Key, Expected] = {}
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        for title, quantile in (
            ("Time to first token", self.ttft),
            ("End to end", self.end_to_end),
            ("Inter-token latency", self.gap),
            ("Time per output token", self.per_token),
            ("Prompt length", self.prompt_length),
            ("Output length", self.output_length),
        ):
            expected |= {(title, name): quantile(share) for name, share in shares.items()}
        slots = self._scale.slots * self._servers
        capacity = self._scale.blocks * self._servers
        in_tokens = capacity * self._scale.block_tokens
        in_bytes = capacity * self._scale.block_bytes
        host_blocks = self._scale.host_blocks * self._servers
        host_bytes = host_blocks * self._scale.block_bytes
        returned_bytes = self.returned_blocks * self._scale.block_bytes
        expected |= _titled("Received requests by endpoint", self.received())
        expected |= _titled(
            "Finished requests by reason",
            {end: total(self._ends[end]) for end in FINISH_REASONS},
        )
        expected |= _titled(
            "Aborts by cause",
            {cause: total(self._causes[cause]) for cause in get_args(AbortCause)},
        )
        expected |= _titled(
            "Rejections by reason",
            {reason: total(self._refusals[reason]) for reason in get_args(RejectReason)},
        )
        expected |= _titled("Evicted blocks by cause", self.evicted_blocks())
        expected |= _titled("Tokens kept and dropped by budgets", self.budget_tokens())
        expected |= _titled("Compaction time", dict.fromkeys(shares, self.within_a_request(with_budget=True)))
        expected |= _titled("Copy time", dict.fromkeys(shares, self.within_a_request(with_budget=False)))
        return expected | {
            ("Goodput", "goodput"): self.goodput(),
            ("Error ratio", "error ratio"): overall(self.error_ratio),
            ("Error ratio", "failed"): overall(self.error_ratio),
            ("Error ratio", "refused"): overall(self.refused_ratio),
            ("Finished requests by objective", "met"): self.met(),
            ("Finished requests by objective", "not met"): self.missed(),
            ("Generated tokens", "generated"): self.generated,
            ("TTFT p95", "p95"): self.ttft(0.95),
            ("Time to first token", "objective"): constant(self._scale.objectives.ttft_seconds),
            ("Time per output token", "objective"): constant(self._scale.objectives.inter_token_seconds),
            ("Replicas", "targets"): constant(self._servers),
            ("Replicas", "up"): constant(self._servers),
            ("Replicas", "ready"): constant(self._servers),
            ("Replicas", "down"): Expected("last", 0, 0),
            ("Engines by state", "ready"): constant(self._servers),
            ("Running", "running"): self._running(),
            ("Waiting", "waiting"): self._waiting(),
            ("Running and waiting", "running"): self._running(),
            ("Running and waiting", "waiting"): self._waiting(),
            ("Running and waiting", "limit"): constant(slots),
            ("Use of the limits", "running"): Expected("surge", TOGETHER, 1.0),
            ("Use of the limits", "open"): Expected("surge", TOGETHER, 1.0),
            ("Waiting by reason", ALL): self._waiting(),
            # A status has no series before it is first answered, so a rate does not see the first ones.
            ("HTTP answers by status", "400"): total(1, self._refusals["invalid"] + self._refusals["too_long"]),
            ("HTTP answers by status", "429"): total(0, self._refusals["queue_full"]),
            ("HTTP answers by outcome", "disconnect"): total(0, self._causes["disconnect"]),
            ("Tokens a second", "generated"): self.generated,
            ("Tokens a second", "computed prompt"): total(self.prompt_tokens - self.cached_tokens),
            ("Tokens a second", "cached prompt"): total(self.cached_tokens),
            ("Prefill and decode share", ALL): overall(1.0),
            ("KV pool in use", "used"): Expected("surge", TOGETHER, 1.0),
            ("Usage", "used"): Expected("surge", TOGETHER, 1.0),
            ("Usage", "fullest replica"): Expected("surge", 0.8, 1.0),
            ("Blocks by state", "used"): Expected("surge", TOGETHER * capacity, capacity),
            ("Blocks by state", "capacity"): constant(capacity),
            ("Capacity in tokens", "used"): Expected("surge", TOGETHER * in_tokens, in_tokens),
            ("Capacity in tokens", "capacity"): constant(in_tokens),
            ("Fragmentation", "empty slots"): Expected("peak", 0.01, 1.0),
            ("Evictions and preemptions", "evicted blocks"): total(1, math.inf),
            ("Evictions and preemptions", "preemption"): total(1, math.inf),
            ("Discarded tokens by reason", "preemption"): total(1, math.inf),
            # At rest: while the engine reports its blocks, a scrape may see them on their way from state to state.
            ("Bytes by tier and state", ALL): Expected("last", in_bytes + host_bytes, in_bytes + host_bytes),
            ("Bytes by tier and state", "device used"): Expected("surge", TOGETHER * in_bytes, in_bytes),
            ("Bytes by tier and state", "host used"): Expected("peak", returned_bytes, host_bytes),
            ("Host blocks by state", ALL): Expected("last", host_blocks, host_blocks),
            ("Host blocks by state", "used"): Expected("peak", self.returned_blocks, host_blocks),
            ("Host copies and evictions", "save"): total(self.returned_blocks, math.inf),
            ("Host copies and evictions", "load"): total(self.returned_blocks, math.inf),
            ("Host copies and evictions", "evicted from host"): total(1, math.inf),
        }

    def of_replica(self) -> dict[str, Expected]:
        """By title, the one series of a replica in the dashboard that keeps them apart."""
        return {
            "State": Expected("last", 1, 1),
            "Finished requests": total(len(self._ended)),
            "Error ratio": overall(self.error_ratio),
            "Goodput": self.goodput(),
            "Time to first token, p95": self.ttft(0.95),
            "Inter-token latency, p95": self.gap(0.95),
            "End to end, p95": self.end_to_end(0.95),
            "Running": self._running(),
            "Waiting": self._waiting(),
            "Generated tokens": self.generated,
            "Prompt tokens": total(self.prompt_tokens),
            "KV pool in use": Expected("surge", TOGETHER, 1.0),
            "Fragmentation": Expected("peak", 0.01, 1.0),
        }

    def _running(self) -> Expected:
        """Preemption takes requests out of the batch for a while."""
        slots = self._scale.slots * self._servers
        return Expected("surge", TOGETHER * slots, slots)

    def _waiting(self) -> Expected:
        """The server bounds those that wait and those that run together, so a slot that stays free for want of blocks
        lets one more wait."""
        slots, queue = self._scale.slots * self._servers, self._scale.queue * self._servers
        return Expected("surge", TOGETHER * queue, queue + slots)


def _titled(title: str, series: dict[str, Expected]) -> dict[Key, Expected]:
    return {(title, name): expected for name, expected in series.items()}


def _near(values: Iterable[float | None], share: float, bucket: float, lag: float = 0.0) -> Expected:
    """Bounds of a quantile that a histogram shows: the samples beside its rank, and a bucket's width."""
    known = sorted(value for value in values if value is not None)
    rank = share * len(known)
    below = known[max(0, math.floor(rank) - 1)]
    above = known[min(len(known) - 1, math.ceil(rank))]
    return Expected("overall", max(0.0, (below - lag) / bucket), above * bucket + lag)
