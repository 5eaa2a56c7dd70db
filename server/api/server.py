"""The process: binds, serves from the first second, and drains when told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from server.api.app import create_app
from server.api.errors import APIError
from server.api.http1 import IDLE_CONNECTION_SECONDS, Protocol
from server.api.ports import Engine
from server.api.service import Service
from server.api.watch import cancel
from server.config import ServeSettings, UnusableOption
from server.generation import Phase
from server.metrics import Metrics

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.1
_WATCH_SECONDS = 1.0
_LAG_SECONDS = 0.25
# What a finished answer may take to reach a slow reader once the engine is done.
_FLUSH_SECONDS = 3
# How long connections stay open after the port is closed, for requests that are on their way on them.
_FAREWELL_SECONDS = 0.3
# asyncio accepts so many connections in one go. When descriptors run out it logs an error for each of them, every
# second, so this is small; the kernel's own queue, set by `bind`, is not.
_ACCEPTED_AT_ONCE = 8
_KERNEL_BACKLOG = 2048
# Rounds of the loop from accepting a connection to its transport, which cannot be made once the port is closed.
_ROUNDS_TO_CONNECT = 4
# How long connections that only the kernel has accepted are taken in, where clients come back without a pause.
_CATCH_UP_SECONDS = 2.0
# Python lets a busy thread run for 5 ms before another gets its turn; with an engine, tokenizers and templates at work
# the loop that answers everybody would wait for several of them in a row.
_SWITCH_SECONDS = 0.001
# What the engine may take to end after its last request; its step in progress cannot be interrupted.
_STOP_SECONDS = 2.0


def serve(settings: ServeSettings) -> int:
    """Serve until a signal, then end the process: with 0 after a drain, 1 if the model cannot be had. Returns 1 if the
    port or a file of keys cannot.

    SIGTERM or SIGINT drains: /ready turns 503; new requests are taken for `drain_delay` and refused from then on; open
    ones finish within `shutdown_timeout`, and what is left then ends with an error. The port stays open meanwhile. A
    second signal ends the process at once.
    """
    from server.engine import AsyncEngine

    try:
        listener = bind(settings.host, settings.port)
    except OSError as error:
        logger.error(
            "cannot listen on %s:%d: %s; choose with --host and --port",
            settings.host,
            settings.port,
            error.strerror or error,
        )
        return 1
    _allow_many_connections()
    sys.setswitchinterval(_SWITCH_SECONDS)
    metrics = Metrics(
        CollectorRegistry(),
        settings.served_names[0],
        objectives=settings.objectives,
        compat=settings.metrics_compat,
    )
    try:
        code = asyncio.run(run(AsyncEngine(settings, metrics), metrics, settings, listener))
    except UnusableOption as error:
        logger.error("%s", error)
        return 1
    _end(code)  # the interpreter would spend seconds on freeing what the system frees at once


def _allow_many_connections() -> None:
    """Use all descriptors the system grants: the usual soft limit of 1,024 is fewer than one load test's clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_KERNEL_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_CONNECTION_SECONDS,
        backlog=_ACCEPTED_AT_ONCE,
        http=Protocol,
        ws="none",
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn would close the port at the first one, before the drain is over."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_KERNEL_BACKLOG)  # asyncio has lowered it to what it accepts at once

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Whoever could connect is answered, unless so many come that there is no end to it. uvicorn alone would reset
        connections that only the kernel has accepted, and close open ones over requests that have arrived and are not
        read yet."""
        loop = asyncio.get_running_loop()
        quiet, until = 0, loop.time() + _CATCH_UP_SECONDS
        while quiet < _ROUNDS_TO_CONNECT and loop.time() < until:
            quiet = 0 if any(select.select(sockets or (), (), (), 0)) else quiet + 1
            await asyncio.sleep(0)  # the loop accepts some
        for server in self.servers:
            server.close()
        for _ in range(10):
            await asyncio.sleep(_FAREWELL_SECONDS / 10)
            if not self.server_state.connections:
                break
        await super().shutdown(sockets)


async def run(engine: Engine, metrics: Metrics, settings: ServeSettings, listener: socket.socket) -> int:
    """Serve `engine` on `listener` until a signal or until it cannot load; the exit code. Raises UnusableOption."""
    app = create_app(engine, metrics, settings)
    service: Service = app.state.service
    if settings.scheduling_policy == "fair" and not settings.api_key and settings.api_key_file is None:
        logger.warning("--scheduling-policy fair shares between the holders of API keys, and there are none")
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        name, delay = signal.Signals(number).name, settings.drain_delay
        if service.leaving:
            logger.warning("%s again: ending at once", name)
            _end(128 + number)
        service.leaving = True
        if delay and service.phase is Phase.READY:
            logger.info("%s: not ready any more; taking requests for %g seconds; once more ends at once", name, delay)
            loop.call_later(delay, refuse_new, f"after {delay:g} seconds")
        else:
            refuse_new(name)

    def refuse_new(when: str) -> None:
        service.draining = True
        timeout = settings.shutdown_timeout
        logger.info("%s: finishing open requests, for up to %g seconds; once more ends at once", when, timeout)
        stopping.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    http = _Uvicorn(http_config(app))
    serving = asyncio.create_task(http.serve([listener]))
    lag = asyncio.create_task(_watch_lag(metrics))
    logger.info("listening on %s (loading the model)", url_of(listener))
    service.warming_up = True
    try:
        await engine.start()
        await service.in_worker(app.openapi)  # made once; the first 405 would hold up all others for it
        code = await _until_stopped(engine, service, stopping, url_of(listener))
        await _drain(service, settings.shutdown_timeout)
    finally:
        # What is still open now is cut off, and counted in our own log; uvicorn would print a traceback for each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        http.should_exit = True
        await serving
        await cancel(lag)
        service.close()
    try:
        await asyncio.wait_for(engine.stop(), _STOP_SECONDS)
    except TimeoutError:
        logger.warning("the engine's last step does not end; leaving it behind")
        _end(code)
    if engine.status.phase is not Phase.DEAD and engine.model is None:
        _end(code)  # a thread is still loading, and the interpreter would wait for it
    for number in _SIGNALS:
        loop.remove_signal_handler(number)
    logger.info("stopped")
    return code


async def _drain(service: Service, timeout: float) -> None:
    """Lets all finish that was let in, also what is being checked and tokenized and has not reached the engine yet."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while loop.time() < deadline:
        if not service.preparing:
            break
        await asyncio.sleep(_POLL_SECONDS / 10)
    left = max(0.0, deadline - loop.time())
    try:
        finished = await asyncio.wait_for(service.engine.drain(left), left + _STOP_SECONDS)
    except TimeoutError:
        finished = False
    if not finished:
        logger.warning("ended requests that were still open after %g seconds", timeout)


def _end(code: int) -> NoReturn:
    """Leave without waiting for threads."""
    logging.shutdown()
    os._exit(code)


def _warm_up(service: Service) -> bool:
    """Makes what the first requests would wait for, and all others with them; False if the chat template that the
    operator names cannot be used."""
    from server.text.grammar import GrammarError

    tokenizer = service.engine.tokenizer
    assert tokenizer is not None, "the engine is ready"
    try:
        service.grammars()
    except GrammarError as error:
        logger.warning("%s", error)
    try:
        template = service.chat_template(tokenizer)
        template.prepare()
    except APIError as error:
        if service.settings.chat_template is not None:
            logger.error("cannot serve: %s", error.message)
            return False
        logger.warning("%s", error.message)
    else:
        logger.info("chat    tool calls in the form of %s", template.reply_format.name)
    return True


async def _watch_progress(engine: Engine) -> None:
    """Says in the log when the engine hangs and when it goes on."""
    stalled = 0.0
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        now = engine.status.stalled_seconds
        if now and not stalled:
            logger.warning("a step has not ended for %.0f seconds (--stall-timeout); /health is 503 until it does", now)
        elif stalled and not now and engine.status.phase is not Phase.DEAD:
            logger.warning("the step that took more than %.0f seconds is over", stalled)
        stalled = now


async def _watch_lag(metrics: Metrics) -> None:
    """Measures how late the loop comes round to what is due."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_SECONDS
        await asyncio.sleep(_LAG_SECONDS)
        metrics.http.lagged(max(0.0, loop.time() - due))


async def _until_stopped(engine: Engine, service: Service, stopping: asyncio.Event, url: str) -> int:
    """Waits for a signal: 0. An engine that dies before it was ready has nothing to serve: 1, and so has a server
    whose operator names a chat template that cannot be used.

    One that dies later leaves the port open, so that probes and people can read why.
    """
    while not stopping.is_set():
        status = engine.status
        if status.phase is Phase.DEAD:
            logger.error("cannot serve: %s", status.detail)
            return 1
        if status.phase is Phase.READY:
            if not await service.in_worker(_warm_up, service):
                return 1
            service.warming_up = False
            logger.info("ready: %s", url)
            watch = asyncio.create_task(_watch_progress(engine))
            await stopping.wait()
            watch.cancel()
            break
        try:
            await asyncio.wait_for(stopping.wait(), _POLL_SECONDS)
        except TimeoutError:
            continue
    return 0
