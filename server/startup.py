"""From options to something that can run: loads the model, measures it, sizes its pool and makes its scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from server.config import ServeSettings
from server.generation import ModelCard
from server.kvpool.layout import Visibility
from server.metrics import Metrics
from server.model.errors import ModelLoadError
from server.model.loader import LoadedModel, load_model
from server.model.memory import (
    MemoryDivision,
    available_main_memory,
    available_memory,
    divide_memory,
    host_blocks,
    readable,
    startup_report,
)
from server.model.runner import ModelRunner
from server.reports import ModelReport, StartupPhase
from server.scheduler.budget import make_budget
from server.scheduler.cache import can_share
from server.scheduler.scheduler import Scheduler, SchedulerConfig
from server.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A loaded model with all that serves it. `device_type`: "cpu" or "cuda"."""

    card: ModelCard
    device_type: str
    tokenizer: Tokenizer
    runner: ModelRunner
    scheduler: Scheduler


def start_up(settings: ServeSettings, metrics: Metrics, device: Executor, report: Report) -> Started:
    """Load and measure. `device` is the thread that will run the steps; the model is touched on it from the probe on.

    Raises ModelLoadError with a sentence for the operator.
    """
    with _timed(metrics, "load_weights"):
        loaded = load_model(settings, report)
    limits = settings.step_limits(loaded.device.type)
    max_scored_tokens = min(256, limits.max_num_batched_tokens)

    report("measuring the largest step", 0.0)
    logger.info("measuring the largest step")
    with _timed(metrics, "profile"):
        runner = device.submit(
            ModelRunner,
            loaded.model,
            settings.attention_backend,
            settings.block_size,
            max_model_len=loaded.max_model_len,
            vocab_size=_vocab_size(loaded),
            cache_dtype=settings.kv_cache_dtype,
            scored=settings.eviction == "h2o",
        ).result()
        if settings.eviction is not None and not runner.layout.takes_budgets:
            given = "--kv-budget" if settings.kv_policy is None else f"--kv-policy {settings.eviction}"
            raise ModelLoadError(
                f"{given} does not go with this model: some of its layers see only a window or "
                "chunk of the text, which is counted in places of the cache, and evicting tokens moves these; "
                "leave out --kv-policy and --kv-budget"
            )
        groups = tuple(group.visibility for group in runner.layout.groups)
        if settings.kv_host_memory and not can_share(groups, settings.admission == "reserve"):
            raise ModelLoadError(
                "--kv-host-memory keeps blocks of the prefix cache, which --admission reserve does without on a model "
                "in which layers see only a window or chunk of the text: leave one of the two out"
            )
        step_bytes = device.submit(
            runner.measure_worst_step,
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            limits.max_num_seqs + max_scored_tokens,
        ).result()
        division = divide_memory(
            settings,
            runner.layout,
            device_type=loaded.device.type,
            weight_bytes=loaded.weight_bytes,
            available_bytes=available_memory(loaded.device),
            step_bytes=step_bytes,
            unpacked_bytes=runner.unpacked_block_bytes,
            max_model_len=loaded.max_model_len,
        )
        left_bytes = division.left_bytes if loaded.device.type == "cpu" else available_main_memory()
        num_host_blocks = host_blocks(settings, runner.layout, left_bytes)
        report("allocating the cache", 0.0)
        logger.info("allocating a cache of %s", readable(division.pool_bytes))
        device.submit(runner.allocate, division.num_blocks).result()
        device.submit(runner.allocate_host, num_host_blocks).result()

    scheduler = Scheduler(
        SchedulerConfig(
            block_size=settings.block_size,
            num_blocks=division.num_blocks - 1,  # the trash block is the runner's
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_scored_tokens=max_scored_tokens,
            prefix_caching=settings.enable_prefix_caching,
            admission=settings.admission,
            policy=settings.scheduling_policy,
            num_host_blocks=num_host_blocks,
            groups=groups,
        )
    )
    budget = None
    if settings.eviction is not None and settings.kv_budget is not None:
        budget = make_budget(settings.kv_budget, settings.eviction, settings.block_size)
    card = _model_card(settings, loaded, scheduler.cache.longest(budget), _ways_out(settings, groups))
    if card.max_model_len < loaded.max_model_len:
        runner.limit_length(card.max_model_len)
    shares = scheduler.cache.prefix is not None
    _announce(settings, loaded, runner, card, division, shares)
    _tell_metrics(settings, metrics, loaded, runner, card, division, shares)
    return Started(card, loaded.device.type, loaded.tokenizer, runner, scheduler)


def _ways_out(settings: ServeSettings, groups: tuple[Visibility, ...]) -> str:
    """What lets a pool hold longer sequences."""
    ways = ["raise it with --kv-blocks or --kv-bytes"]
    if settings.eviction is not None:
        ways.append("let no request keep more than a --kv-budget")
    if all(group.reach is not None for group in groups):
        ways.append("lower --max-num-batched-tokens")  # a step's own tokens are what is left of a bounded cache
    return ", or ".join(ways)


def _model_card(settings: ServeSettings, loaded: LoadedModel, pool_tokens: int, ways_out: str) -> ModelCard:
    if pool_tokens < loaded.max_model_len:
        max_model_len, limited_by = pool_tokens, f"the KV pool: {ways_out}"
    elif settings.max_model_len is not None:
        max_model_len, limited_by = loaded.max_model_len, "--max-model-len"
    else:
        max_model_len, limited_by = loaded.max_model_len, "the model's own context length"
    return ModelCard(
        served_names=settings.served_names,
        root=loaded.root,
        revision=loaded.revision,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=_vocab_size(loaded),
        max_model_len=max_model_len,
        limited_by=limited_by,
        eos_token_ids=loaded.eos_token_ids,
        created=int(time.time()),
        default_sampling=loaded.default_sampling,
    )


def _vocab_size(loaded: LoadedModel) -> int:
    """Ids below this have an embedding and a text; heads are often padded beyond the tokenizer's last id."""
    embedded: int = loaded.model.config.get_text_config(decoder=True).vocab_size
    return min(embedded, loaded.tokenizer.vocab_size)


def _announce(
    settings: ServeSettings,
    loaded: LoadedModel,
    runner: ModelRunner,
    card: ModelCard,
    division: MemoryDivision,
    shares: bool,
) -> None:
    names = ", ".join(card.served_names)
    for line in startup_report(
        loaded.root if names == loaded.root else f"{loaded.root}, served as {names}",
        card.dtype,
        str(loaded.device),
        runner.layout,
        [spec.window for spec in runner.specs],
        loaded.max_model_len,
        division,
        runner.host.num_blocks,
        limit=card.max_model_len,
        budget=settings.kv_budget,
    ):
        logger.info("%s", line)
    logger.info(
        "default %s where a request says nothing (set by the model's generation config: %s)",
        ", ".join(f"{name} {value:g}" for name, value in card.sampling_defaults.items()),
        ", ".join(card.default_sampling) or "none",
    )
    limits = settings.step_limits(loaded.device.type)
    logger.info(
        "batch   up to %d sequences and %s tokens a step, %s admission, prefix cache %s",
        limits.max_num_seqs,
        f"{limits.max_num_batched_tokens:,}",
        settings.admission,
        "on" if shares else "off",
    )


def _tell_metrics(
    settings: ServeSettings,
    metrics: Metrics,
    loaded: LoadedModel,
    runner: ModelRunner,
    card: ModelCard,
    division: MemoryDivision,
    shares: bool,
) -> None:
    layout = runner.layout
    left_bytes = division.left_bytes - (runner.host.nbytes if loaded.device.type == "cpu" else 0)
    metrics.engine.memory("weights", division.weight_bytes)
    metrics.engine.memory("kv_cache", division.num_blocks * layout.bytes_per_block)
    metrics.engine.memory("activations_peak", division.step_bytes)
    metrics.engine.memory("device_free", max(0, left_bytes))
    report = ModelReport(
        model=loaded.root,
        revision=loaded.revision,
        dtype=card.dtype,
        max_model_len=card.max_model_len,
        block_size=settings.block_size,
        num_blocks=division.num_blocks - 1,
        kv_cache_dtype=layout.dtype.name,
        prefix_caching=shares,
        max_num_seqs=settings.step_limits(loaded.device.type).max_num_seqs,
        max_queued_requests=settings.max_queued_requests,
        block_bytes=layout.bytes_per_block,
        host_blocks=runner.host.num_blocks,
        num_groups=len(layout.groups),
    )
    metrics.engine.loaded(report)
    metrics.pool.allocated(report)


@contextmanager
def _timed(metrics: Metrics, phase: StartupPhase) -> Iterator[None]:
    begun = time.monotonic()
    yield
    metrics.engine.startup(phase, time.monotonic() - begun)
