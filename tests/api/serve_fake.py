"""The whole server process over the fake engine: `python -m tests.api.serve_fake OPTIONS-AS-JSON`."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import sys
import threading
import time

from prometheus_client import CollectorRegistry

from server.api.server import bind, run
from server.config import ServeSettings
from server.generation import Phase
from server.metrics import Metrics
from tests.api.fake_engine import FakeEngine


class Engine(FakeEngine):
    """`load`: "ready", "fail", or "hang" in a thread that nothing can stop. `stop_hangs`: stop() never returns.

    From one SIGUSR1 to the next a step has been running for 61 seconds.
    """

    def __init__(self, load: str, stop_hangs: bool) -> None:
        super().__init__(max_model_len=10_000)
        self.load = load
        self.stop_hangs = stop_hangs
        self.phase, self.detail = Phase.LOADING, "reading weights"
        self.loaded = False

    async def start(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._stall_or_go_on)
        if self.load == "hang":
            threading.Thread(target=time.sleep, args=(60,)).start()
        else:
            asyncio.get_running_loop().call_later(0.3, self._loaded)

    def _loaded(self) -> None:
        if self.load == "fail":
            self.phase, self.detail = Phase.DEAD, "bloom is not supported"
        else:
            self.phase, self.detail, self.loaded = Phase.READY, "", True

    def _stall_or_go_on(self) -> None:
        self.stalled_seconds = 0.0 if self.stalled_seconds else 61.0

    async def stop(self) -> None:
        if self.stop_hangs:
            await asyncio.Event().wait()


def main(
    load: str = "ready",
    step_seconds: float = 0.01,
    drain_delay: float = 0,
    shutdown_timeout: float = 20,
    stop_hangs: bool = False,
    max_descriptors: int | None = None,
    chat_template: str | None = None,
    port: int = 0,
) -> int:
    if max_descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptors, max_descriptors))
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
    engine = Engine(load, stop_hangs)
    engine.step_seconds = step_seconds
    settings = ServeSettings(
        model="tiny", drain_delay=drain_delay, shutdown_timeout=shutdown_timeout, chat_template=chat_template
    )
    return asyncio.run(run(engine, Metrics(CollectorRegistry(), "tiny"), settings, bind("127.0.0.1", port)))


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
