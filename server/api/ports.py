"""What HTTP sees of the engine, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol

from server.generation import EngineStatus, GenerationRequest, ModelCard, Output

if TYPE_CHECKING:
    from server.reports import AbortCause, CacheSnapshot
    from server.text.tokenizer import Tokenizer


class Stream(Protocol):
    """The outputs of one sequence; it ends after the output with a finish reason.

    `__anext__` raises GenerationFailed if the engine dies. Output is coalesced: a slow reader gets fewer, larger ones.
    """

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    @property
    def queue_seconds(self) -> float | None:
        """From submission to first admission; None while it waits, and for what never ran."""
        ...

    def close(self, cause: AbortCause = "disconnect") -> None:
        """End the sequence and free what it holds. Does nothing to one that has finished."""
        ...


class Engine(Protocol):
    """`submit` raises EngineUnavailable, QueueFull, BodyTooLarge or RequestTooLong; all methods are called on the HTTP
    loop.
    """

    @property
    def status(self) -> EngineStatus: ...

    @property
    def model(self) -> ModelCard | None: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    async def start(self) -> None: ...

    def check_room(self, more: int) -> None:
        """Raises QueueFull if `more` sequences could not be submitted now, however short they are."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> Sequence[Stream]: ...

    async def cache_snapshot(self) -> CacheSnapshot:
        """Who holds which blocks. Raises EngineUnavailable while the model loads and once the engine is dead."""
        ...

    async def drain(self, timeout: float) -> bool: ...

    async def stop(self) -> None: ...
