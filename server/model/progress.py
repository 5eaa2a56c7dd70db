"""Progress of loading, wherever it is counted: Hugging Face's downloads, its weight loading, our own conversion."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm.asyncio import tqdm_asyncio as tqdm  # the class that huggingface_hub's signature asks for

Report = Callable[[str, float], None]
"""Called with what is being done, in words, and the share of it that is done, from 0 to 1."""

logger = logging.getLogger(__name__)


class Progress:
    """Passes progress on to `report`, and shows it: as a bar on a terminal, else as a log line for each thing begun.

    Use as a context manager, so that the bar is closed whatever happens.
    """

    def __init__(self, report: Report, stream: TextIO | None = None) -> None:
        self._report = report
        self._stream = stream or sys.stderr
        self._bar: tqdm[Any] | None = None
        self._doing = ""

    def __call__(self, doing: str, fraction: float) -> None:
        fraction = min(max(fraction, 0.0), 1.0)
        if doing != self._doing:
            self._begin(doing)
        if self._bar is not None:
            self._bar.n = round(100 * fraction)
            self._bar.refresh()
        self._report(doing, fraction)

    def _begin(self, doing: str) -> None:
        self._close()
        self._doing = doing
        if self._stream.isatty():
            form = "{desc} {percentage:3.0f}% |{bar}| {elapsed}"
            self._bar = tqdm(total=100, desc=doing, file=self._stream, bar_format=form)
        else:
            logger.info("%s", doing)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()


def part(report: Report, doing: str, start: float, end: float) -> Callable[[float], None]:
    """A callback for the share of one part, which goes from `start` to `end` of the whole."""
    return lambda fraction: report(doing, start + (end - start) * fraction)


class _Counted:
    """Stands in for a tqdm bar around `items`; tells `tick` the share that has been taken."""

    def __init__(self, items: Iterable[Any], tick: Callable[[float], None]) -> None:
        self._items = list(items)
        self._tick = tick

    def __iter__(self) -> Iterator[Any]:
        for index, item in enumerate(self._items, start=1):
            yield item
            self._tick(index / len(self._items))


@contextmanager
def weights_counted(tick: Callable[[float], None]) -> Iterator[None]:
    """While open, transformers' bar over the weights it loads becomes calls of `tick`."""
    from transformers.utils import logging as hf_logging

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and kwargs.get("desc") == "Loading weights":
            return _Counted(args[0], tick)
        return factory(*args, **kwargs)

    previous = hf_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(previous)


@contextmanager
def tensors_counted(module: Any, tick: Callable[[float], None]) -> Iterator[None]:
    """While open, `module.tqdm` becomes calls of `tick`: transformers' GGUF reader asks no hook."""
    original = module.tqdm
    module.tqdm = lambda items, **_: _Counted(items, tick)
    try:
        yield
    finally:
        module.tqdm = original


def download_bar(tick: Callable[[float], None]) -> type[tqdm[Any]]:
    """A class for huggingface_hub's `tqdm_class`: tells `tick` the share of the bytes that is there, draws nothing.

    The hub counts bytes received and bytes written in two bars with a growing total; the further one counts.
    """
    furthest = 0.0

    class DownloadBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            self.n += n or 0
            if self._counts_bytes and self.total:
                furthest = max(furthest, self.n / self.total)
                tick(furthest)
            return None

    return DownloadBar
