"""A paced server to measure a load tool by: `python -m tests.loadtest.fake_llm FILE FAULT_EVERY`.

It prints its URL, and on SIGTERM writes to FILE what it did. `CHUNK` tokens come at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from pathlib import Path

from tests.bench.fake_server import Exchange, serving

TTFT_SECONDS = 0.15
GAP_SECONDS = 0.06
CHUNK = 2  # tokens
FAULTS = ("", "error", "cut", "unfinished", "busy")


class FakeLLM:
    """Every `fault_every`-th answer goes wrong, in each of the ways by turns; 0 is never."""

    def __init__(self, fault_every: int = 0) -> None:
        self.fault_every = fault_every
        self.answers = self.tokens = 0
        self.largest_history = 0
        self.faults: dict[str, int] = dict.fromkeys(FAULTS, 0)
        self._numbers = itertools.count(1)
        self._ways = itertools.cycle(FAULTS[1:])

    async def handle(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.respond(200, {"object": "list", "data": [{"id": "fake"}]})
            return
        number = next(self._numbers)
        fault = next(self._ways) if self.fault_every and number % self.fault_every == 0 else ""
        self.faults[fault] += 1
        self.largest_history = max(self.largest_history, len(exchange.body.get("messages", ())))
        if fault == "busy":
            exchange.respond(429, {"error": {"message": "the queue is full"}})
        elif exchange.body.get("stream"):
            await self._stream(exchange, fault)
        else:
            await self._whole(exchange)

    async def _whole(self, exchange: Exchange) -> None:
        wanted = exchange.body["max_tokens"]
        await asyncio.sleep(TTFT_SECONDS)
        choice = {"index": 0, "message": {"role": "assistant", "content": " word" * wanted}, "finish_reason": "length"}
        exchange.respond(200, {"choices": [choice], "usage": exchange.usage(wanted)})
        self._count(wanted)

    async def _stream(self, exchange: Exchange, fault: str) -> None:
        wanted = exchange.body["max_tokens"]
        exchange.begin()
        await asyncio.sleep(TTFT_SECONDS)
        for sent in range(0, wanted, CHUNK):
            if sent:
                await asyncio.sleep(GAP_SECONDS)
                if fault == "error":
                    exchange.event({"error": {"message": "out of memory"}})
                    return
                if fault == "cut":
                    exchange.cut()
                    return
            last = sent + CHUNK >= wanted and fault != "unfinished"
            text = " word" * min(CHUNK, wanted - sent)
            if "messages" in exchange.body:
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": "length" if last else None}
                exchange.event({"choices": [choice]})
            else:
                exchange.text(text, None, "length" if last else None)
        exchange.done(wanted)
        if fault != "unfinished":
            self._count(wanted)

    def _count(self, tokens: int) -> None:
        self.answers += 1
        self.tokens += tokens


async def main(fault_every: int) -> FakeLLM:
    """Serve until SIGTERM."""
    fake = FakeLLM(fault_every)
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    async with serving(fake.handle) as url:
        print(url, flush=True)
        await over.wait()
    return fake


if __name__ == "__main__":
    served = asyncio.run(main(int(sys.argv[2])))
    told = {name: getattr(served, name) for name in ("answers", "tokens", "faults", "largest_history")}
    Path(sys.argv[1]).write_text(json.dumps(told))
