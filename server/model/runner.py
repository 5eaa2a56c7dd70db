"""Runs planned steps on the model. The only code that touches the device; used by one thread."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server.kvpool.compaction import compact
from server.kvpool.host import HostTensors
from server.kvpool.layout import CACHE_DTYPES, CacheLayout
from server.kvpool.quantise import unscaled
from server.kvpool.tensors import KVTensors, unpacked_bytes
from server.model.attention import select_backends
from server.model.attention.metadata import StepMetadata
from server.model.attention.reference import MAX_SCORES
from server.model.hook import IMPLEMENTATION, Layer, PagedAttention, attending
from server.model.masks import MaskFiller
from server.model.positions import pin_rope, take_over_temperature
from server.model.probe import check_numbers, probe, probe_tokens
from server.model.sampler import Sampler
from server.model.spec import LayerSpec, cache_layout
from server.model.trial import pack, worst_step
from server.step import StepPlan, StepResult

_CHECKED_TOKENS = 12
_CHECKED_CHUNKS = (4, 7, 1)


class ModelRunner:
    """A hooked model, its pool and its sampler.

    The model is switched to paged attention, probed, and compared with itself as it was (`server.model.probe`).

    specs: the layers. layout: what they cache. pool: the cache's memory, only the trash block until `allocate`.
    host: its second tier, nothing until `allocate_host`.
    backends: the name of each layer's attention backend.

    Args:
        model: a loaded causal language model on its device; it belongs to the runner from now on.
        backend: "auto", "reference" or "cpu".
        block_size: tokens of a block.
        max_model_len: longest sequence that will be served; by default the most that the configuration promises.
            Rotary embeddings that depend on the sequence's length are fixed for this one.
        vocab_size: ids from here on are never drawn; by default those beyond the model's own vocabulary.
        cache_dtype: how the cache stores numbers, a name of CACHE_DTYPES; "auto" is as the model computes.
        scored: whether the cache has a score for each head of a token, for eviction by attention.

    Raises:
        UnsupportedModel: the model could only be served wrongly.
        ValueError: the backend is unknown or does not run on the model's device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: str,
        block_size: int,
        *,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        cache_dtype: str = "auto",
        scored: bool = False,
    ) -> None:
        self.model = model.eval()
        self.device = model.device
        self.block_size = block_size
        self.max_model_len = max_model_len or _promised_len(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

        probed = probe(model)
        self._sampler = Sampler(vocab_size or model.config.vocab_size)
        self._mask_filler = MaskFiller(vocab_size or model.config.vocab_size)
        self.specs: tuple[LayerSpec, ...] = tuple(layer.spec for layer in probed)
        backends = select_backends(backend, self.specs, self.device)
        self.backends = tuple(backend.name for backend in backends)
        self._dtype = probed[0].dtype
        computed = unscaled(self._dtype)
        self.layout: CacheLayout = cache_layout(self.specs, computed, block_size, scored)

        pin_rope(model, self.max_model_len)
        ids = probe_tokens(model.config, _CHECKED_TOKENS)
        expected = self._unpaged_logits(ids)
        group_of = {layer: index for index, group in enumerate(self.layout.groups) for layer in group.layers}
        self._layers: dict[nn.Module, Layer] = {
            layer.module: Layer(
                layer.spec,
                layer.geometry,
                backend,
                take_over_temperature(layer.module),
                group_of[layer.spec.layer_idx],
                layer.latent,
            )
            for layer, backend in zip(probed, backends, strict=True)
        }
        check_numbers(
            model,
            expected,
            lambda neighbour: self._chunked_logits(ids, neighbour),
            self.max_model_len,
            _CHECKED_CHUNKS[0],
        )
        # Only now: the check judges how the model is served, not what a smaller cache costs.
        self.layout = replace(self.layout, dtype=computed if cache_dtype == "auto" else CACHE_DTYPES[cache_dtype])
        self.allocate(1)

    def limit_length(self, max_model_len: int) -> None:
        """Serve sequences of up to `max_model_len` tokens only, as when the pool turns out to hold no longer ones.

        Nothing may be cached yet: rotary embeddings that depend on the length are fixed anew.
        """
        self.max_model_len = max_model_len
        pin_rope(self.model, max_model_len)

    def allocate(self, num_blocks: int) -> None:
        """Replace the pool by an empty one of `num_blocks` blocks, block 0 the trash block.

        What host memory holds belonged to the old one: there is none until `allocate_host` is called again.
        """
        self.pool = KVTensors(self.layout, num_blocks, self._dtype, self.device)
        self.allocate_host(0)

    def allocate_host(self, num_blocks: int) -> None:
        """Replace what the pool has of host memory by `num_blocks` empty blocks, numbered from 0."""
        self.host = HostTensors(self.pool, num_blocks)

    @property
    def unpacked_block_bytes(self) -> int:
        """What each block of the pool may take beside it in a step, for backends that read no other numbers than the
        model computes with: it is unpacked for one layer at a time."""
        return unpacked_bytes(self.layout, self._dtype) if "cpu" in self.backends else 0

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute the step's tokens, write their keys and values to the pool, and draw the samples.

        The masks of constrained samples are made meanwhile.

        Raises:
            SequencesFailed: from the sampler (NonFiniteLogits) or a constraint; the pool holds the step's keys and
                values all the same, and the blocks that were to be copied are copied: they must not be copied again,
                as what was to be saved may be overwritten by now. Compactions are done, too, and what the step's
                queries saw has its scores.
        """
        clock = _Clock(self.device)
        self.host.save(plan.saves)
        clock.lap()
        for compaction in plan.compactions:
            compact(self.pool, compaction)
        clock.lap()
        self.host.load(plan.loads)
        clock.lap()
        pending = self._mask_filler.begin(plan)
        try:
            logits = self.compute_logits(plan)
        finally:
            if pending is not None:
                pending.settle()
        masks = pending.result() if pending is not None else None
        clock.lap()
        num_samples = len(plan.params)
        token_ids, logprobs = self._sampler.sample(logits[:num_samples], plan, masks)
        scores = self._sampler.score(logits[num_samples:], plan)
        clock.lap()
        save_seconds, compaction_seconds, load_seconds, forward_seconds, sample_seconds = clock.seconds()
        copy_seconds = save_seconds + load_seconds
        return StepResult(
            token_ids, logprobs, scores, forward_seconds, sample_seconds, copy_seconds, compaction_seconds
        )

    def measure_worst_step(self, max_tokens: int, max_seqs: int, logit_rows: int) -> int:
        """Bytes that a step takes at most beside weights and pool, for so many packed tokens, sequences and logits.

        On CUDA the step is run, on the trash block, and its peak measured. On a CPU, where a large model takes minutes
        for it and memory is not partitioned, the peak is estimated from the model's widths.
        """
        if self.device.type != "cuda":
            return self._estimate_step(max_tokens, logit_rows)
        groups = len(self.layout.groups)
        plan = worst_step(max_tokens, max_seqs, logit_rows, self.max_model_len, self.block_size, groups)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(plan)
        peak = torch.cuda.max_memory_reserved(self.device) - before
        torch.cuda.empty_cache()
        return peak

    def _estimate_step(self, max_tokens: int, logit_rows: int) -> int:
        """Logits, their float32 form and the sampler's copy; for each token the residual stream and the two widest
        activations of a layer, thrice over for operands and results that are alive together; and the reference
        backend's scores of a long prompt, where it has layers or computes those of observed sequences."""
        config, model = self.model.config, self.model
        tables = {
            id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module
        }
        matrices = [weight for weight in model.parameters() if weight.dim() > 1 and id(weight) not in tables]
        hidden: int = config.hidden_size
        queries = [spec.num_heads * spec.key_dim for spec in self.specs]
        widest = max([hidden, *queries, *(max(matrix.shape[-2:]) for matrix in matrices)])
        active: int = getattr(config, "num_experts_per_tok", None) or 1
        logits: int = 3 * logit_rows * config.vocab_size * 4
        activations: int = 3 * max_tokens * (2 * active * widest + hidden) * self._dtype.itemsize
        heads = [
            spec.num_heads
            for spec, name in zip(self.specs, self.backends, strict=True)
            if name == "reference" or self.layout.scored
        ]
        scores = min(MAX_SCORES, max([0, *heads]) * max_tokens * self.max_model_len)
        return logits + activations + 3 * scores * 4

    @torch.inference_mode()
    def compute_logits(self, plan: StepPlan) -> Tensor:
        """The step without its sampling: logits [S + P, V] at the plan's `logit_indices`."""
        parts = (plan.input_ids, plan.positions, plan.slots, plan.logit_indices, plan.context_lens, plan.block_tables)
        host = torch.from_numpy(np.concatenate([part.ravel() for part in parts], dtype=np.int64))
        if self.device.type == "cuda":
            host = host.pin_memory()
        packed = host.to(self.device, non_blocking=True)
        input_ids, positions, slots, rows, context_lens, tables = packed.split([part.size for part in parts])
        steps = [
            StepMetadata(
                pool=self.pool,
                slots=group_slots,
                positions=positions,
                context_lens=context_lens,
                block_tables=group_tables,
                query_starts=plan.query_starts,
                host_context_lens=plan.context_lens,
                host_block_tables=host_tables,
                observed=plan.observed,
            )
            for group_slots, group_tables, host_tables in zip(
                slots.view(plan.slots.shape), tables.view(plan.block_tables.shape), plan.block_tables, strict=True
            )
        ]
        if plan.observed is not None:
            written = plan.slots[:, np.repeat(plan.observed, np.diff(plan.query_starts))].ravel()
            self.pool.reset_scores(torch.from_numpy(written).to(self.device, non_blocking=True))
        inputs = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        with attending(PagedAttention(self._layers, steps)):
            if self._keeps_logits:
                logits: Tensor = self.model(**inputs, logits_to_keep=rows).logits
                return logits[0]
            hidden = self.model.base_model(**inputs).last_hidden_state
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        computed: Tensor = head(hidden[0, rows])
        return computed

    @torch.inference_mode()
    def _unpaged_logits(self, ids: Tensor) -> Tensor:
        """Logits [n, V] of the tokens `ids` by the model's own attention."""
        self.model.set_attn_implementation("eager")
        logits: Tensor = self.model(input_ids=ids[None].to(self.device), use_cache=False).logits
        self.model.set_attn_implementation(IMPLEMENTATION)
        return logits[0]

    def _chunked_logits(self, ids: Tensor, neighbour: int | None) -> Tensor:
        """Logits [n, V] of the tokens `ids`, computed chunk by chunk in a small pool full of NaN, after one token at
        position `neighbour` of another sequence in each pack."""
        groups = len(self.layout.groups)
        width = -(-len(ids) // self.block_size)
        self.allocate(1 + groups * (width + 1))
        self.pool.fill_(float("nan"))
        blocks = list(range(groups * (width + 1), 0, -1))
        theirs = [[blocks.pop()] for _ in range(groups)]
        tables = [blocks[group::groups] for group in range(groups)]
        logits, start = [], 0
        for size in _CHECKED_CHUNKS:
            chunk = (ids[start : start + size].tolist(), start, tables)
            others = [] if neighbour is None else [([int(ids[0])], 0, theirs)]
            plan = pack([*others, chunk], self.block_size, first_position=neighbour)
            logits.append(self.compute_logits(plan)[len(others) :])
            start += size
        return torch.cat(logits)


def _promised_len(model: PreTrainedModel) -> int:
    promised = getattr(model.config, "max_position_embeddings", None)
    return promised if isinstance(promised, int) and promised > 0 else 4096


class _Clock:
    """Seconds between laps, by the device's own clock where it has one, so that timing never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._laps.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The time of each lap, once all of them are over."""
        if self._cuda:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._laps, self._laps[1:], strict=False)]
