"""What is asked of the server: prompts, their shared prefix, and the bodies of requests."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from server.bench.client import BenchError

Prompt = str | list[int]


def load_prompts(path: Path | None = None) -> list[str]:
    """The packaged prompts, or those of a file.

    A `.jsonl` file has one JSON string or one object with a "prompt" a line; any other file one prompt a line.
    Raises BenchError for a file that cannot be read so.
    """
    source = files("server.bench").joinpath("prompts.jsonl") if path is None else path
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--prompts {path}: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path is not None and path.suffix != ".jsonl":
        prompts = [line for _, line in numbered]
    else:
        prompts = [_prompt_of(line, f"{path}:{number}") for number, line in numbered]
    if not prompts:
        raise BenchError(f"--prompts {path}: holds no prompt")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BenchError(f"--prompts {where}: is not JSON ({error})") from None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str) or not prompt:
        raise BenchError(f'--prompts {where}: must be a JSON string or an object with a "prompt"')
    return prompt


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests are due, endlessly: a Poisson process of `rate` a second."""
    random = np.random.default_rng(seed)
    due = 0.0
    while True:
        due += float(random.exponential(1.0 / rate))
        yield due


@dataclass(slots=True)
class Workload:
    """Makes the bodies of requests.

    Each prompt starts with a tag of its own (after the shared prefix), or the server's prefix cache would answer for
    prompts that come round again; `verbatim` leaves the tag out. Prompts of token ids go as they are.
    run: starts each tag, different from run to run.
    extras: fields beside the standard ones, those of `PROBE_EXTRAS` that the server accepts.
    schema: JSON schema that every second body asks the answer to follow.
    mix: prompts with the tokens of their answers, instead of `prompts` and `output_tokens`.
    """

    prompts: Sequence[Prompt]
    model: str
    output_tokens: int
    run: str
    chat: bool = False
    temperature: float = 0.0
    seed: int = 0
    prefix: str = ""
    verbatim: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] | None = None
    mix: Sequence[tuple[str, int]] = ()
    _tags: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def bodies(self) -> Iterator[bytes]:
        """Bodies without end, the prompts in an order shuffled by the seed; each comes once before any comes twice."""
        random = Random(self.seed)
        constrained = itertools.cycle((True, False)) if self.schema is not None else itertools.repeat(False)
        asked: Sequence[tuple[Prompt, int]] = self.mix or [(prompt, self.output_tokens) for prompt in self.prompts]
        while True:
            for prompt, output_tokens in random.sample(asked, len(asked)):
                if isinstance(prompt, str):
                    prompt = self.prefix + self.tag(next(self._tags)) + prompt
                yield self.encode(prompt, output_tokens, self.schema if next(constrained) else None)

    def tag(self, number: int) -> str:
        """What makes a prompt new to the server's prefix cache."""
        return "" if self.verbatim else f"[{self.run}-{number}] "

    def encode(self, prompt: Prompt, max_tokens: int, schema: dict[str, Any] | None = None) -> bytes:
        """The body that asks for `max_tokens` after `prompt`, of JSON that follows `schema` where there is one."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        asked |= {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature, "stream": True}
        if schema is not None:
            named = {"name": "bench", "schema": schema, "strict": True}
            asked["response_format"] = {"type": "json_schema", "json_schema": named}
        return json.dumps(asked | self.extras).encode()


PROBE_EXTRAS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
    {},
)
"""From all we would like to send to what every server takes."""


async def fit_prefix(
    text: str, tokens: int, count: Callable[[str], Awaitable[int]], tag: str, attempts: int = 8
) -> str:
    """Cut a prefix of about `tokens` tokens (1 % off at most) out of `text`, repeated as often as needed.

    `count` asks the server for the tokens of a prompt, so that this needs no tokenizer. `tag` starts the prefix and
    makes it new to the server's cache; the trials start with another, lest they fill that cache before the measurement.
    """
    source = (text + "\n\n") * math.ceil(tokens * 16 / len(text) + 1)
    length = tokens * 4
    for attempt in range(attempts):
        body = f" {source[:length]}\n\n"
        measured = await count(f"[{tag}-{attempt}]{body}")
        if abs(measured - tokens) <= max(1, tokens // 100):
            return f"[{tag}]{body}"
        length = min(len(source), max(1, round(length * tokens / measured)))
    raise BenchError(f"--shared-prefix {tokens}: found no text of that many tokens; the last one tried had {measured}")
