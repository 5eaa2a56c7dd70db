"""Each check of the cache passes on right numbers and fails on wrong ones; measurements are whole or say why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor

import loadtest.cache_check
import server.model.runner
from loadtest.cache_check import (
    Finding,
    bytes_written,
    evicting_model,
    host_copies,
    host_steps,
    logits_of_cache,
    moved_rows,
    run_cache_checks,
)
from loadtest.cache_times import Work, run_timings
from loadtest.checkpoint import TINY
from server.kvpool.compaction import compact
from server.kvpool.host import HostTensors
from server.kvpool.layout import CACHE_DTYPES
from server.kvpool.tensors import KVTensors
from server.step import Compaction, EvictionPolicy

CPU = torch.device("cpu")
WORK = Work(batches=((1, 40), (3, 20)), compacted=64, copied_bytes=2**18, seconds=0.0)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def well(found: Finding) -> bool:
    return found.error <= found.tolerance and not found.complaint


def every_other_wrong(monkeypatch: pytest.MonkeyPatch, change: Callable[[Compaction], Compaction], module: str) -> None:
    """The side that is compared comes first each time."""
    calls: list[Compaction] = []

    def wrong(pool: KVTensors, compaction: Compaction) -> None:
        calls.append(compaction)
        compact(pool, change(compaction) if len(calls) % 2 else compaction)

    monkeypatch.setattr(f"{module}.compact", wrong)


@pytest.mark.parametrize("cache", ["int8", "fp8", "bfloat16"])
def test_numbers_rounded_otherwise_are_noticed(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert well(bytes_written(cache, torch.float32, CPU, 0))
    write, pools = KVTensors.write, []

    def wrong(pool: KVTensors, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        pools.append(pool)  # the first one is the oracle
        if pool is not pools[0]:
            key = torch.where(key.abs() == key.abs().amax(-1, keepdim=True), key, key * 1.003)
        return write(pool, layer, slots, key, value)

    monkeypatch.setattr(KVTensors, "write", wrong)
    assert bytes_written(cache, torch.float32, CPU, 0).error > 0.01


def test_bytes_read_otherwise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    read = KVTensors.read

    def wrong(pool: KVTensors, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = read(pool, layer, slots)
        return keys * 1.05, values

    monkeypatch.setattr(KVTensors, "read", wrong)
    assert "what is read is not what was written" in bytes_written("int8", torch.bfloat16, CPU, 0).complaint


def test_logits_from_a_cache_unpacked_wrongly_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the side that is compared unpacks."""
    assert well(logits_of_cache("llama", "int8", CPU, 0))
    unpack = KVTensors.unpack

    def wrong(pool: KVTensors, layer: int, blocks: Tensor) -> None:
        unpack(pool, layer, blocks)
        pool.unpacked.flat_keys(layer).mul_(1.01)

    monkeypatch.setattr(KVTensors, "unpack", wrong)
    assert not well(logits_of_cache("llama", "int8", CPU, 0))


def test_a_cache_of_the_models_own_type_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CACHE_DTYPES, "int8", CACHE_DTYPES["float32"])
    assert not well(logits_of_cache("llama", "int8", CPU, 0))


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_rows_moved_otherwise_are_noticed(policy: EvictionPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert well(moved_rows("int8", policy, CPU, 0))
    every_other_wrong(monkeypatch, lambda what: replace(what, sinks=what.sinks - 1), loadtest.cache_check.__name__)
    assert moved_rows("int8", policy, CPU, 0).error > 100


@pytest.mark.parametrize("policy", ["h2o", "window"])
def test_other_kept_tokens_are_noticed(policy: EvictionPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    every_other_wrong(
        monkeypatch,
        lambda what: replace(what, sinks=what.sinks - 1, recent=what.recent - 3),
        server.model.runner.__name__,
    )
    assert not well(evicting_model("llama", policy, CPU, 0))


def test_wrong_scores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend that is compared is not the reference."""
    monkeypatch.setattr("server.model.attention.cpu.add_scores", lambda *_: None)
    assert not well(evicting_model("llama", "h2o", CPU, 0))


def test_copies_that_are_not_whole_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert well(host_copies("fp8", CPU, 0))
    save = HostTensors.save

    def wrong(host: HostTensors, pairs: Sequence[tuple[int, int]]) -> None:
        save(host, pairs[:-1])

    monkeypatch.setattr(HostTensors, "save", wrong)
    assert host_copies("fp8", CPU, 0).error > 100
    assert not well(host_steps(CPU, 0))


def test_checks_that_fail_and_those_too_late_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("no kernel image")

    for name in ("KVTensors", "tiny_model"):
        monkeypatch.setattr(f"loadtest.cache_check.{name}", explode)
    outcomes = run_cache_checks("cpu", 0, inf, lambda _: None)
    assert len(outcomes) == 31
    assert {(outcome.ok, outcome.note) for outcome in outcomes} == {(False, "RuntimeError: no kernel image")}
    late = run_cache_checks("cpu", 0, 0.0, lambda _: None)
    assert {(outcome.ok, outcome.error) for outcome in late} == {(False, None)}


def test_measurements_are_whole_and_a_failure_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("loadtest.cache_times.compact", explode)
    timings = run_timings(TINY, WORK, "cpu", inf, lambda _: None)
    assert len({timing.what for timing in timings}) == len(timings) == 20
    failed = [timing for timing in timings if timing.milliseconds is None]
    assert [timing.note for timing in failed] == ["RuntimeError: no kernel image"] * 4
    assert all("tokens" in timing.what for timing in failed)
    by_name = {timing.what: timing for timing in timings}
    stored = 2 * 2 * 2 * 16  # layers, keys and values, heads, width
    assert by_name["decode bfloat16, 3 x 20"].moved_bytes == 60 * stored * 2
    assert by_name["decode int8, 3 x 20"].moved_bytes == 60 * (stored + 2 * 2 * 2 * 4)
    assert by_name["decode bfloat16 latent, 1 x 40"].moved_bytes == 40 * 2 * 9 * 16 * 2
    assert by_name["save to host, one run"].gigabytes_per_second
    late = run_timings(TINY, WORK, "cpu", 0.0, lambda _: None)
    assert [timing.what for timing in late] == [timing.what for timing in timings]
    assert all(timing.milliseconds is None and "not done" in timing.note for timing in late)
