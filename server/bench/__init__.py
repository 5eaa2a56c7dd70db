"""`sluice bench`: load on an OpenAI-compatible server, and how fast its tokens come."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run `sluice bench` with these arguments; returns the exit status."""
    from server.bench.command import main as run

    return run(argv)
