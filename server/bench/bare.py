"""A bare loop of the model's forward passes: what the hardware gives when nothing is served.

`python -m server.bench.bare [flags of sluice serve]` loads the model as the server does, leaves it as Hugging Face
built it, and answers requests of `server.bench.baseline`, one JSON object a line on standard input and output. It is a
process of its own, idle while the server is measured.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

CacheKind = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class BareTurn:
    """Seconds a static batch took, its prefill among them, and the tokens it drew: [batch][output tokens]."""

    seconds: float
    prefill_seconds: float
    token_ids: list[list[int]]


@torch.inference_mode()
def static_batch(model: PreTrainedModel, prompts: torch.Tensor, output_tokens: int, cache_kind: CacheKind) -> BareTurn:
    """Continue `prompts` [batch, length] greedily by `output_tokens` each, all together, with Hugging Face's own cache.

    All prompts have one length, so nothing is padded and no mask is needed: the best case for a static batch.
    """
    length = prompts.shape[1]
    parameters = inspect.signature(model.forward).parameters
    keyword = "past_key_values" if "past_key_values" in parameters else "cache"  # renamed within transformers 5
    arguments: dict[str, Any] = {keyword: _cache(model, cache_kind, length + output_tokens), "use_cache": True}
    if "logits_to_keep" in parameters:
        arguments["logits_to_keep"] = 1
    _wait(prompts.device)
    start = time.perf_counter()
    drawn = [model(input_ids=prompts, **arguments).logits[:, -1].argmax(-1)]
    _wait(prompts.device)
    prefilled = time.perf_counter()
    for _ in range(output_tokens - 1):
        drawn.append(model(input_ids=drawn[-1][:, None], **arguments).logits[:, -1].argmax(-1))
    token_ids: list[list[int]] = torch.stack(drawn, dim=1).tolist()  # waits for the device
    return BareTurn(time.perf_counter() - start, prefilled - start, token_ids)


def _cache(model: PreTrainedModel, kind: CacheKind, length: int) -> DynamicCache | StaticCache:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Bare:
    """Answers the parent's requests; see `baseline.BareProcess` for what they mean."""

    def __init__(self, flags: Sequence[str]) -> None:
        from server.flags import load_settings
        from server.model.loader import load_model

        loaded = load_model(load_settings(flags), lambda doing, _: print(doing, file=sys.stderr, flush=True))
        self.model: PreTrainedModel = loaded.model
        self.tokenizer = loaded.tokenizer
        self.device = next(self.model.parameters()).device

    def about(self) -> dict[str, Any]:
        return {
            "threads": torch.get_num_threads(),
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
        }

    def prompts(self, texts: list[str], tokens: int) -> dict[str, Any]:
        """Token ids of each text, exactly `tokens` long; a text that is too short is repeated."""
        cut = []
        for text in texts:
            ids = self.tokenizer.encode(text)
            if not ids:
                raise ValueError(f"a text gives no tokens: {text[:40]!r}")
            cut.append((ids * -(-tokens // len(ids)))[:tokens])
        return {"prompts": cut}

    def run(self, prompts: list[list[int]], batch: int, output_tokens: int, cache: CacheKind) -> dict[str, Any]:
        """Static batches of `batch`, one after the other, until all prompts are done."""
        turns = [
            static_batch(self.model, torch.tensor(prompts[i : i + batch], device=self.device), output_tokens, cache)
            for i in range(0, len(prompts), batch)
        ]
        return {
            "seconds": sum(turn.seconds for turn in turns),
            "prefill_seconds": sum(turn.prefill_seconds for turn in turns),
        }


def main(flags: Sequence[str]) -> None:
    """Answer until standard input closes. What libraries print goes to standard error, not between the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bare = Bare(flags)
    operations: dict[str, Callable[..., dict[str, Any]]] = {
        "about": bare.about,
        "prompts": bare.prompts,
        "run": bare.run,
    }
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(operations[request.pop("op")](**request)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
