"""What the routes share: the engine, the metrics, the settings, and the life of the server around them."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from starlette.requests import Request

from server.api.chat.template import load_template
from server.api.errors import APIError, show, unavailable
from server.api.ports import Engine
from server.config import ServeSettings
from server.generation import ModelCard, Phase
from server.metrics import Metrics

if TYPE_CHECKING:
    from server.api.tracing import Tracer
    from server.text.chat_template import ChatTemplate
    from server.text.grammar import GrammarCompiler
    from server.text.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

_TOKENIZE_THREADS = 2


class OpenRequest(Protocol):
    """A request that generates, until all its sequences have ended."""

    @property
    def request_id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    def abort(self) -> list[str]:
        """End what still runs, with an error for its reader; the ids of the sequences that this ended."""
        ...


class Service:
    """One per app.

    leaving: set at the first signal: /ready is 503, and each answer closes its connection.
    draining: set after --drain-delay, before the engine has heard of it: no new requests are taken.
    keep_alive: seconds of silence after which a stream gets a comment.
    arriving_bytes: bytes held of bodies that are not complete.
    warming_up: the engine is ready, and what the first requests would wait for is still being made.
    preparing: bodies that are being checked and tokenized; each has a place in the queue already.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        settings: ServeSettings,
        tracer: Tracer | None = None,
    ) -> None:
        self.engine = engine
        self.metrics = metrics
        self.settings = settings
        self.keep_alive = settings.sse_keep_alive or math.inf
        self.leaving = False
        self.draining = False
        self.warming_up = False
        self.arriving_bytes = 0
        self.preparing = 0
        self._tracer = tracer
        self._open: dict[str, list[OpenRequest]] = {}
        self._making = Lock()  # of the next two, which several workers may ask for at once
        self._template: ChatTemplate | None = None
        self._grammars: GrammarCompiler | None = None
        self._serial = itertools.count()
        self._seeds = Random(secrets.randbits(64) if settings.seed is None else settings.seed)
        self._workers = ThreadPoolExecutor(_TOKENIZE_THREADS, thread_name_prefix="tokenize")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large")
        self._scrapes = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    @property
    def phase(self) -> Phase:
        phase = self.engine.status.phase
        if self.draining and phase is not Phase.DEAD:
            return Phase.DRAINING
        return Phase.LOADING if self.warming_up and phase is Phase.READY else phase

    @property
    def detail(self) -> str:
        """What is being loaded, or why the engine is dead, in words."""
        if self.warming_up and self.engine.status.phase is Phase.READY:
            return "preparing the chat template and grammars"
        return self.engine.status.detail

    def ready_model(self) -> tuple[ModelCard, Tokenizer]:
        """The model in service. Raises APIError 503 unless requests can be taken."""
        phase = self.phase
        model, tokenizer = self.engine.model, self.engine.tokenizer
        if phase is not Phase.READY or model is None or tokenizer is None:
            raise unavailable(Phase.LOADING if phase is Phase.READY else phase, self.detail)
        return model, tokenizer

    def fresh_seed(self) -> int:
        """A seed for a prompt that brought none; with --seed, the same ones in the same order after each start."""
        return self._seeds.getrandbits(64) - 2**63

    def fresh_serial(self) -> int:
        """Distinguishes concurrent requests that arrived under one request id."""
        return next(self._serial)

    def chat_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Made at the first call; call it in a worker. Raises APIError."""
        with self._making:
            if self._template is None:
                self._template = load_template(tokenizer, self.settings)
            return self._template

    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars, made at the first call; call it in a worker. Raises GrammarError."""
        from server.text.grammar import GrammarCompiler

        model, tokenizer = self.engine.model, self.engine.tokenizer
        assert model is not None, "the engine is ready"
        assert tokenizer is not None, "the engine is ready"
        with self._making:
            if self._grammars is None:
                self._grammars = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
            return self._grammars

    def opened(self, request: OpenRequest) -> None:
        """From here on the request can be aborted by its id, until `closed`."""
        self._open.setdefault(request.request_id, []).append(request)

    def closed(self, request: OpenRequest) -> None:
        requests = self._open[request.request_id]
        requests.remove(request)
        if not requests:
            del self._open[request.request_id]

    def abort(self, request_id: str, tenant: str) -> list[str] | None:
        """End all of the tenant's requests of this id; the sequences that were ended, None if there is no request."""
        requests = [request for request in self._open.get(request_id, ()) if request.tenant == tenant]
        if not requests:
            return None
        return [sequence for request in requests for sequence in request.abort()]

    async def in_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what would hold up the event loop in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, lambda: function(*args, **kwargs))

    async def in_large_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for what takes long (huge bodies and answers), one at a time and out of everyone else's way."""
        return await asyncio.get_running_loop().run_in_executor(self._large, lambda: function(*args, **kwargs))

    async def render_metrics(self) -> bytes:
        """The text of /metrics, made on a thread of its own: not even long prompts may delay a scrape."""
        return await asyncio.get_running_loop().run_in_executor(self._scrapes, self.metrics.render)

    def close(self) -> None:
        for executor in (self._workers, self._large, self._scrapes):
            executor.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def served_name(asked: str | None, model: ModelCard) -> str:
    """The name to answer under. Raises APIError 404 for a model that is not served."""
    if asked is None:
        return model.served_names[0]
    if asked in model.served_names:
        return asked
    names = ", ".join(show(name) for name in model.served_names[:8])
    raise APIError(
        404, f"There is no model {show(asked)}; this server has {names}.", param="model", code="model_not_found"
    )
