"""A server that stands in for any peer: it takes whatever options that has, and a few of its own by the environment.

FAKE_PEER_NOTE: a file to which it appends its options, a line a start, and its pid first.
FAKE_PEER_MISBEHAVE: "plain" refuses fields that are not OpenAI's, "short" ends after half of the tokens, "endless"
ends no stream with [DONE], "broken" answers every second request with 500, "dead" never starts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.bench.fake_server import Exchange, serving, well_behaved

MISBEHAVIOUR = os.environ.get("FAKE_PEER_MISBEHAVE", "")
served = 0


async def answer(exchange: Exchange) -> None:
    global served
    if exchange.path in ("/health", "/ready"):
        exchange.respond(200, {"status": "ok"})
        return
    if exchange.path == "/v1/completions":
        served += 1
        if MISBEHAVIOUR in ("plain", "endless") and "ignore_eos" in exchange.body:
            exchange.respond(422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"})
            return
        if MISBEHAVIOUR == "broken" and exchange.body["max_tokens"] > 1 and served % 2:
            exchange.respond(500, {"error": {"message": "no more memory"}})
            return
        if MISBEHAVIOUR == "short":
            exchange.body["max_tokens"] = max(1, exchange.body["max_tokens"] // 2)
        if MISBEHAVIOUR == "endless":
            exchange.begin()
            for number in range(1, exchange.body["max_tokens"] + 1):
                exchange.text(" word", number)
            exchange.text("", exchange.body["max_tokens"], "length")
            exchange.end()
            return
    await well_behaved(exchange)


def note_start(arguments: list[str]) -> None:
    with Path(os.environ["FAKE_PEER_NOTE"]).open("a") as file:
        print(os.getpid(), *arguments, file=file)


async def main() -> None:
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["version"]) or arguments[:1] == ["-c"]:
        print("version: 1.25 (fake)")
        return
    if MISBEHAVIOUR == "dead":
        sys.exit("the model cannot be loaded")
    note_start(arguments)
    async with serving(answer, "127.0.0.1", int(arguments[arguments.index("--port") + 1])):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
