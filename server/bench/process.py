"""Servers and helpers that the benchmark starts for itself and takes down again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, Any, TypeVar

from server.bench.client import BenchError, Client
from server.bench.stream import error_message

T = TypeVar("T")

SERVE = (sys.executable, "-m", "server", "serve")
READY_TIMEOUT = 1800.0  # a first start may have to download and convert a model
POLL_SECONDS = 0.2
END_SECONDS = 15.0
NOTICE_SECONDS = 0.3  # a connection breaks before its process is known to be dead
TAIL_BYTES = 3000


class Stopped(BenchError):
    """Somebody wanted it to end."""

    status = 130


@asynccontextmanager
async def own_server(flags: Sequence[str], show: Callable[[str], None], port: int | None = None) -> AsyncIterator[str]:
    """Serve on a port of this machine and yield the URL once the server is ready; gone afterwards.

    flags: options of `sluice serve`, the model among them.
    show: told the phase while it loads.
    port: a free one unless given.
    Raises BenchError, with the end of the server's log, if it cannot start or dies while it is used.
    """
    port = free_port() if port is None else port
    url = f"http://127.0.0.1:{port}"
    async with running([*SERVE, *flags, "--host=127.0.0.1", f"--port={port}"], url, show):
        yield url


@asynccontextmanager
async def running(
    command: Sequence[str],
    url: str,
    show: Callable[[str], None],
    ready: str = "/ready",
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[None]:
    """Run the command of a server that listens at `url` from when it is ready, as `own_server` does with ours.

    ready: the path that answers 200 once it is.
    environment: variables beside our own.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise BenchError(f"{command[0]} cannot be run: {error.strerror or error}") from None
        try:
            await _until_ready(process, Client(url, timeout=10.0), ready, log, show)
            try:
                yield
            except BenchError:
                await _check_alive(process, log)  # its death would be the better explanation
                raise
            await _check_alive(process, log)
        finally:
            await end(process)


def run_until_told(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, or until Ctrl-C, SIGTERM or SIGHUP: then what was started is taken down, and Stopped raised."""

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise Stopped("stopped") from None


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask the process to stop, make it if it does not, and take what it started along. It must lead its own session."""
    try:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _until_ready(
    process: asyncio.subprocess.Process, client: Client, path: str, log: IO[bytes], show: Callable[[str], None]
) -> None:
    deadline = client.clock() + READY_TIMEOUT
    while client.clock() < deadline:
        if process.returncode is not None:
            raise BenchError(f"the server did not start (exit status {process.returncode}):\n{_tail(log)}")
        try:
            response = await client.request("GET", path)
        except (OSError, TimeoutError):
            show("starting the server")
        else:
            if response.status == 200:
                return
            show(f"the server is not ready yet: {error_message(response.body)}")
        await asyncio.sleep(POLL_SECONDS)
    raise BenchError(f"the server was not ready within {READY_TIMEOUT:.0f} s:\n{_tail(log)}")


async def _check_alive(process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
    """Raise BenchError if the process is dead."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(NOTICE_SECONDS):
            await process.wait()
    if process.returncode is not None:
        raise BenchError(f"the server died (exit status {process.returncode}):\n{_tail(log)}")


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _tail(log: IO[bytes]) -> str:
    log.flush()
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - TAIL_BYTES))
    return log.read().decode("utf-8", "replace").strip()
