"""What a load run amounts to: numbers, a table for people, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from server.bench.load import Run
from server.bench.stats import Distribution

EXAMPLES = 5  # kinds of failure shown under a table; JSON has all


@dataclass(frozen=True, slots=True)
class Level:
    """One row of the table. Times are seconds; rates count only requests that succeeded.

    load: what was applied, such as "8 clients" or "2 requests/s".
    output_tokens_per_s, input_tokens_per_s: over the time from the first request sent to the last one ended.
    inter_token: see `Record.inter_token`; chunk_gap: between chunks as they came, whatever they held.
    tokens_per_chunk: mean number of tokens in a chunk of text.
    send_delay: how late the client sent what was due; large values mean that the client was the bottleneck.
    uncounted: requests without usage from the server: their output is counted in chunks, their input not at all.
    client_cpu: share of one core that the client used.
    fragmentation: see `FragmentationWatch`; None where the server does not say.
    """

    load: str
    requests: int
    failures: int
    failure_kinds: dict[str, int]
    seconds: float
    output_tokens: int
    input_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_s: float
    ttft: Distribution | None
    inter_token: Distribution | None
    chunk_gap: Distribution | None
    e2e: Distribution | None
    send_delay: Distribution | None
    tokens_per_chunk: float | None
    uncounted: int
    client_cpu: float
    fragmentation: Distribution | None = None

    def json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(load: str, run: Run, fragmentation: Distribution | None = None) -> Level:
    """Sum up a run: failed requests are counted and named, and add nothing to rates and latencies."""
    good = [record for record in run.records if record.failure is None]
    kinds = Counter(record.failure for record in run.records if record.failure is not None)
    seconds = run.seconds
    output = sum(record.output_tokens for record in good)
    inputs = sum(record.prompt_tokens or 0 for record in good)
    chunks = sum(len(record.arrivals) for record in good)
    per_second = 1.0 / seconds if seconds else 0.0
    return Level(
        load=load,
        requests=len(run.records),
        failures=kinds.total(),
        failure_kinds=dict(kinds.most_common()),
        seconds=seconds,
        output_tokens=output,
        input_tokens=inputs,
        cached_tokens=sum(record.cached_tokens or 0 for record in good),
        output_tokens_per_s=output * per_second,
        input_tokens_per_s=inputs * per_second,
        requests_per_s=len(good) * per_second,
        ttft=Distribution.of([record.ttft for record in good if record.ttft is not None]),
        inter_token=Distribution.of(np.concatenate([[], *(record.inter_token() for record in good)])),
        chunk_gap=Distribution.of(np.concatenate([[], *(record.chunk_gaps() for record in good)])),
        e2e=Distribution.of([record.e2e for record in good if record.e2e is not None]),
        send_delay=Distribution.of([record.sent - record.intended for record in good if record.sent is not None]),
        tokens_per_chunk=output / chunks if chunks else None,
        uncounted=sum(record.completion_tokens is None for record in good),
        client_cpu=run.client_cpu_seconds * per_second,
        fragmentation=fragmentation,
    )


def table(levels: Sequence[Level]) -> str:
    """The runs as a table, one a row, with notes under it on anything a reader must know. Times in milliseconds."""
    head = ["load", "requests", "failed", "tok/s out", "tok/s in"]
    head += [f"{name} {p}" for name in ("TTFT", "ITL", "E2E") for p in ("p50", "p95", "p99")]
    rows = [
        [
            level.load,
            str(level.requests),
            str(level.failures),
            f"{level.output_tokens_per_s:.1f}",
            f"{level.input_tokens_per_s:.1f}",
            *_milliseconds(level.ttft),
            *_milliseconds(level.inter_token),
            *_milliseconds(level.e2e),
        ]
        for level in levels
    ]
    lines = [align([head, *rows]), "Times in milliseconds; ITL is the time from token to token."]
    for level in levels:
        lines += [f"{level.load}: {note}" for note in _notes(level)]
    return "\n".join(lines)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column flush left, numbers flush right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _milliseconds(times: Distribution | None) -> list[str]:
    if times is None:
        return ["-"] * 3
    return [milliseconds(value) for value in (times.p50, times.p95, times.p99)]


def milliseconds(seconds: float) -> str:
    """As the tables show a time."""
    return f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f}"


def _notes(level: Level) -> list[str]:
    notes = [f"{count} failed: {kind}" for kind, count in list(level.failure_kinds.items())[:EXAMPLES]]
    if len(level.failure_kinds) > EXAMPLES:
        notes.append(f"... and {len(level.failure_kinds) - EXAMPLES} more kinds of failure (--json has all)")
    if level.tokens_per_chunk is not None and level.tokens_per_chunk > 1.05:
        notes.append(f"a chunk held {level.tokens_per_chunk:.1f} tokens on average")
    if level.cached_tokens:
        notes.append(f"{level.cached_tokens / level.input_tokens:.0%} of the input came from the server's prefix cache")
    if level.fragmentation is not None:
        mean, most = level.fragmentation.mean, level.fragmentation.max
        notes.append(f"fragmentation of the server's KV cache {mean:.1%} on average, at most {most:.1%}")
    if level.uncounted:
        notes.append(f"{level.uncounted} answers without usage: their chunks are counted as tokens, their input not")
    if level.client_cpu > 0.2:
        notes.append(f"the benchmark itself used {level.client_cpu:.0%} of a core")
    if level.send_delay is not None and level.send_delay.p99 > 0.01:
        notes.append(f"sent up to {level.send_delay.p99 * 1000:.0f} ms late (p99): the client was held up")
    return notes
