"""What a start makes of its options: the pool's exact size, the limits it announces, what it tells the metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from server.config import ServeSettings
from server.metrics import Metrics
from server.model.errors import ModelLoadError
from server.scheduler.request import Request
from server.startup import Started, start_up
from server.step import SamplingParams
from tests.tiny_checkpoint import MAX_MODEL_LEN, VOCAB_SIZE, save_tiny_checkpoint

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head dim, float32
BLOCK_BYTES = 16 * BYTES_PER_TOKEN


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def device() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as device:
        yield device


def start(checkpoint: Path, device: ThreadPoolExecutor, **options: Any) -> tuple[Started, CollectorRegistry]:
    registry = CollectorRegistry()
    settings = ServeSettings(model=str(checkpoint), served_model_name=["tiny"], **options)
    return start_up(settings, Metrics(registry, "tiny"), device, lambda phase, fraction: None), registry


def memory(registry: CollectorRegistry, kind: str) -> float | None:
    return registry.get_sample_value("sluice_memory_bytes", {"model_name": "tiny", "kind": kind})


def test_the_pool_is_as_large_as_asked_and_never_grows(checkpoint: Path, device: ThreadPoolExecutor) -> None:
    asked = 50 * BLOCK_BYTES + 7
    started, registry = start(checkpoint, device, kv_bytes=asked, max_num_seqs=8)
    pool = started.runner.pool
    assert pool.nbytes == 50 * BLOCK_BYTES == memory(registry, "kv_cache")
    assert started.scheduler.pool.capacity == 49  # one block is for padding

    storages = {
        tensor.untyped_storage().data_ptr() for layer in (0, 1) for tensor in (pool.keys(layer), pool.values(layer))
    }
    for index in range(20):
        started.scheduler.add(Request(str(index), list(range(40 + index)), SamplingParams(seed=index), 30))
    while (plan := started.scheduler.plan()) is not None:
        started.scheduler.commit(device.submit(started.runner.run, plan).result(), plan)
    assert started.runner.pool is pool
    assert pool.nbytes == 50 * BLOCK_BYTES
    assert storages == {
        tensor.untyped_storage().data_ptr() for layer in (0, 1) for tensor in (pool.keys(layer), pool.values(layer))
    }


@pytest.mark.parametrize(
    ("options", "max_model_len", "limited_by"),
    [
        ({"kv_blocks": 8}, 128, "--kv-blocks"),
        ({"kv_blocks": 32}, MAX_MODEL_LEN, "the model's own"),
        ({"kv_blocks": 32, "max_model_len": 100}, 100, "--max-model-len"),
        ({"kv_blocks": 4, "max_model_len": 100}, 64, "--kv-blocks"),
    ],
)
def test_the_longest_request_and_what_limits_it(
    checkpoint: Path, device: ThreadPoolExecutor, options: dict[str, int], max_model_len: int, limited_by: str
) -> None:
    started, _ = start(checkpoint, device, **options)
    assert started.card.max_model_len == max_model_len
    assert limited_by in started.card.limited_by
    assert started.card.vocab_size == VOCAB_SIZE - 3  # the last rows of the model have no token
    assert started.card.eos_token_ids == {256}


def test_a_person_is_told_what_fits(
    checkpoint: Path, device: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        start(checkpoint, device, kv_blocks=64, max_num_seqs=5, enable_prefix_caching=False)
    told = "\n".join(caplog.messages)
    assert "tiny, float32 on cpu" in told
    assert "2 x GQA (2 KV heads of 8)" in told
    assert f"{BYTES_PER_TOKEN} bytes a token, 64 blocks of 16 tokens: 1,024 tokens, 2 sequences of 512 tokens" in told
    assert "up to 5 sequences and 512 tokens a step, optimistic admission, prefix cache off" in told


def test_the_weights_are_counted(checkpoint: Path, device: ThreadPoolExecutor) -> None:
    started, registry = start(checkpoint, device, kv_blocks=8)
    parameters = sum(parameter.numel() for parameter in started.runner.model.parameters())
    weights = memory(registry, "weights")
    assert weights is not None
    assert parameters * 4 <= weights < parameters * 4 + 4096  # and the buffers of rotary embeddings
    assert started.runner.model.dtype is torch.float32


def test_a_pool_that_cannot_be_had_is_refused(checkpoint: Path, device: ThreadPoolExecutor) -> None:
    with pytest.raises(ModelLoadError, match="at most --kv-blocks"):
        start(checkpoint, device, kv_blocks=10**9)


def test_host_memory_is_a_whole_number_of_blocks(
    checkpoint: Path, device: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        started, registry = start(checkpoint, device, kv_blocks=8, kv_host_memory=5 * BLOCK_BYTES + 7)
    host = started.runner.host
    assert host.nbytes == 5 * BLOCK_BYTES
    assert "5 more blocks, 80 tokens" in "\n".join(caplog.messages)
    free = registry.get_sample_value("sluice_kv_cache_host_blocks", {"model_name": "tiny", "state": "free"})
    assert free == host.num_blocks == 5


@pytest.mark.parametrize(("asked", "reason"), [(BLOCK_BYTES - 1, f"takes {BLOCK_BYTES} bytes"), (2**50, "at most")])
def test_host_memory_that_cannot_be_had_is_refused(
    checkpoint: Path, device: ThreadPoolExecutor, asked: int, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"--kv-host-memory .*{reason}"):
        start(checkpoint, device, kv_blocks=8, kv_host_memory=asked)


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A checkpoint whose layers see 64 tokens."""
    config = save_tiny_checkpoint(tmp_path) / "config.json"
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return tmp_path


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_budgets_are_refused_where_layers_have_windows(windowed: Path, device: ThreadPoolExecutor, policy: str) -> None:
    with pytest.raises(ModelLoadError, match=f"--kv-policy {policy} does not go with this model"):
        start(windowed, device, kv_blocks=8, kv_policy=policy)


def test_a_refusal_names_the_flag_that_was_given(windowed: Path, device: ThreadPoolExecutor) -> None:
    with pytest.raises(ModelLoadError, match="--kv-budget does not go with this model"):
        start(windowed, device, kv_blocks=8, kv_budget=64)


def test_who_asks_for_more_than_the_pool_holds_is_told_every_way_out(
    checkpoint: Path, windowed: Path, device: ThreadPoolExecutor
) -> None:
    limited = start(checkpoint, device, kv_blocks=4, kv_policy="h2o")[0].card.limited_by
    assert "--kv-blocks or --kv-bytes, or let no request keep more than a --kv-budget" in limited
    limited = start(windowed, device, kv_blocks=4)[0].card.limited_by
    assert limited.endswith("or lower --max-num-batched-tokens")


def test_nobody_is_told_of_a_prefix_cache_that_windows_and_reserve_rule_out(
    windowed: Path, device: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        start(windowed, device, kv_blocks=64, admission="reserve")
    assert "reserve admission, prefix cache off" in "\n".join(caplog.messages)
    with pytest.raises(ModelLoadError, match=r"--kv-host-memory .* --admission reserve"):
        start(windowed, device, kv_blocks=64, admission="reserve", kv_host_memory=2**20)


@pytest.mark.parametrize(("policy", "scored"), [("h2o", True), ("window", False), (None, False)])
def test_only_eviction_by_attention_has_scores(
    checkpoint: Path, device: ThreadPoolExecutor, policy: str | None, scored: bool
) -> None:
    started, _ = start(checkpoint, device, kv_blocks=8, kv_policy=policy)
    assert started.runner.layout.scored == scored
    assert (started.runner.pool.scores is not None) == scored


def test_the_cache_has_the_type_that_was_asked_for(
    checkpoint: Path, device: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 50 * BLOCK_BYTES
    with caplog.at_level(logging.INFO):
        started, registry = start(checkpoint, device, kv_bytes=asked, max_num_seqs=8, kv_cache_dtype="int8")
    per_token = 2 * 2 * 2 * (8 + 4)  # a byte a number and a scale for each head's key and value
    assert started.runner.pool.nbytes == asked // (16 * per_token) * 16 * per_token
    assert {storage.dtype for storage in started.runner.pool.storages} == {torch.int8, torch.float32}
    told = "\n".join(caplog.messages)
    assert "tiny, float32 on cpu" in told
    assert f"cache   int8, {per_token} bytes a token" in told
    assert registry.get_sample_value("sluice_memory_bytes", {"model_name": "tiny", "kind": "kv_cache"}) <= asked
    information = [
        sample.labels["kv_cache_dtype"]
        for metric in registry.collect()
        for sample in metric.samples
        if "kv_cache_dtype" in sample.labels
    ]
    assert set(information) == {"int8"}
