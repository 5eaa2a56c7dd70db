"""Servers on this machine that can be stopped, killed and started again, each on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from server.bench.client import BenchError, Client
from server.bench.process import SERVE, end, free_ports

HAPROXY_CONFIG = Path(__file__).parents[1] / "deploy" / "haproxy.cfg"
START_SECONDS = 600.0
EXIT_SECONDS = 180.0
POLL_SECONDS = 0.05
TAIL_BYTES = 3000

MakeCommand = Callable[[int], Sequence[str]]
"""Port -> the command of a server that listens there, on 127.0.0.1."""


def sluice(flags: Sequence[str]) -> MakeCommand:
    """`sluice serve` with these options."""
    return lambda port: [*SERVE, *flags, "--host=127.0.0.1", f"--port={port}"]


class Replica:
    """One of several servers. `log` is a file that all its processes write to, one after the other."""

    def __init__(self, name: str, port: int, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = Client(self.url, timeout=5.0)
        self.log = log
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "started"
        return self._process

    async def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Begin to start; `until_answers` waits. `environment`: variables beside our own."""
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    async def until_answers(self, path: str = "/ready") -> None:
        """Until `path` is answered with 200. Raises BenchError, with the end of the log, if that does not happen."""
        deadline = self.client.clock() + START_SECONDS
        while self.client.clock() < deadline:
            if self.process.returncode is not None:
                raise BenchError(f"{self.name} ended with exit status {self.process.returncode}:\n{self.tail()}")
            with contextlib.suppress(OSError, TimeoutError):
                if (await self.client.request("GET", path)).status == 200:
                    return
            await asyncio.sleep(POLL_SECONDS)
        raise BenchError(f"{self.name} was not ready within {START_SECONDS:.0f} s:\n{self.tail()}")

    async def terminate(self) -> int:
        """Ask it to stop; its exit status. Raises BenchError if it does not within `EXIT_SECONDS`."""
        self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                return await self.process.wait()
        except TimeoutError:
            raise BenchError(f"{self.name} did not stop within {EXIT_SECONDS:.0f} s:\n{self.tail()}") from None

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        """No process is left."""
        if self._process is not None:
            await end(self._process)

    async def get(self, path: str) -> Any:
        """The JSON of an answer. Raises OSError, TimeoutError or ValueError."""
        return (await self.client.request("GET", path)).json()

    def tail(self) -> str:
        return self.log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace").strip()


@asynccontextmanager
async def replicas(makes: Sequence[MakeCommand]) -> AsyncIterator[list[Replica]]:
    """Servers that are ready, one of each command; gone afterwards. Raises BenchError."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = [
            Replica(f"server {number}", port, make(port), folder / f"{number}.log")
            for number, (make, port) in enumerate(zip(makes, free_ports(len(makes)), strict=True), start=1)
        ]
        for replica in made:
            stack.push_async_callback(replica.end)
            await replica.start()
        for replica in made:
            await replica.until_answers()
        yield made


@asynccontextmanager
async def haproxy(servers: Sequence[Replica], check: str = "1s") -> AsyncIterator[tuple[Replica, Client]]:
    """HAProxy with deploy/haproxy.cfg in front of two servers, and a client of its statistics; gone afterwards.

    check: how often it looks after them, as HAProxy writes times. Raises BenchError if it is missing or refuses.
    """
    program = shutil.which("haproxy", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    if program is None:
        raise BenchError("haproxy is missing; on Debian: apt-get install haproxy")
    port, stats_port = free_ports(2)
    with tempfile.NamedTemporaryFile() as log:
        proxy = Replica("haproxy", port, [program, "-f", str(HAPROXY_CONFIG)], Path(log.name))
        environment = {
            "SLUICE_BIND": f"127.0.0.1:{port}",
            "SLUICE_STATS_BIND": f"127.0.0.1:{stats_port}",
            "SLUICE_CHECK": check,
            **{f"SLUICE_{number}": f"127.0.0.1:{server.port}" for number, server in enumerate(servers, start=1)},
        }
        await proxy.start(environment)
        try:
            await proxy.until_answers("/v1/models")
            yield proxy, Client(f"http://127.0.0.1:{stats_port}", timeout=5.0)
        finally:
            await proxy.end()
