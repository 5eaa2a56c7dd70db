"""The check passes on right numbers and fails on each kind of wrong ones."""

from __future__ import annotations

import time
from math import inf

import numpy as np
import pytest
import torch

from loadtest.architectures import ARCHITECTURES, VOCAB, tiny_config
from loadtest.equality import BLOCK_SIZE, LENGTHS, check, kept_as, plans
from server.kvpool.layout import CACHE_DTYPES, EVERYTHING, AttentionKind, CacheLayout, LayerLayout, Visibility
from server.kvpool.tensors import KVTensors
from server.model.runner import ModelRunner


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_plans_compute_each_token_once_over_disjoint_blocks() -> None:
    sequences = [list(range(100 * n, 100 * n + length)) for n, length in enumerate(LENGTHS)]
    tables = [[5, 1, 9, 2, 12, 7], [3, 8, 4], [6, 10, 11, 13]]
    seen = []
    slots: dict[int, int] = {}
    for plan, places in plans(sequences, [tables], [EVERYTHING]):
        assert plan.num_tokens == len(places) == plan.query_starts[-1]
        assert plan.input_ids.tolist() == [sequences[b][p] for b, p in places]
        assert (plan.context_lens >= np.diff(plan.query_starts)).all()
        assert plan.logit_indices[plan.num_sequences :].tolist() == list(range(plan.num_tokens))
        seen += places
        for slot, token in zip(plan.slots[0].tolist(), plan.input_ids.tolist(), strict=True):
            assert slot not in slots
            assert slot >= BLOCK_SIZE
            slots[slot] = token
    assert sorted(seen) == [(b, p) for b, length in enumerate(LENGTHS) for p in range(length)]
    for b, table in enumerate(tables):
        assert [slots[table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(LENGTHS[b])] == sequences[b]


def test_blocks_out_of_sight_are_the_trash_block() -> None:
    sequences = [list(range(length)) for length in LENGTHS]
    tables = [[5, 1, 9, 2, 12, 7], [3, 8, 4], [6, 10, 11, 13]]
    sight = Visibility(window=6)
    hidden = 0
    for plan, places in plans(sequences, [tables, tables], [EVERYTHING, sight]):
        members = sorted({b for b, _ in places})
        for row, b in enumerate(members):
            first = sight.first(min(position for sequence, position in places if sequence == b))
            for index, block in enumerate(tables[b]):
                assert plan.block_tables[0, row, index] == block
                gone = (index + 1) * BLOCK_SIZE <= first
                hidden += gone
                assert plan.block_tables[1, row, index] == (0 if gone else block)
    assert hidden


def test_a_cache_kept_otherwise_than_the_model_asks_is_wrong() -> None:
    whole = CacheLayout((LayerLayout(AttentionKind.MHA, 4, 20, 10),) * 3, CACHE_DTYPES["float32"], BLOCK_SIZE)
    assert kept_as(tiny_config("deepseek_v3"), whole) == ("", "it has latents, but is not served from them")
    assert "share 1 block table" in kept_as(tiny_config("gemma2"), whole)[1]
    assert kept_as(tiny_config("llama"), whole) == ("", "")


def test_what_comes_too_late_is_not_done() -> None:
    outcome = check("llama", torch.float32, "cpu", "auto", seed=0, deadline=time.monotonic() - 1)
    assert not outcome.ok
    assert "not done" in outcome.note


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma2", "deepseek_v2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_right_numbers_are_ok(name: str, dtype: torch.dtype) -> None:
    outcome = check(name, dtype, "cpu", "auto", seed=0, deadline=inf)
    assert outcome.ok, outcome
    assert outcome.error is not None
    assert outcome.error > 0  # two different computations, not one compared with itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_written_to_the_wrong_place_are_noticed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From allocation on, so that the runner's own check at load does not notice first."""
    write, fill = KVTensors.write, KVTensors.fill_

    def misplace(
        pool: KVTensors, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        write(pool, layer, slots, key.roll(1, dims=1) if len(slots) > 6 else key, value)
        return key, value

    def break_then_fill(pool: KVTensors, value: float) -> None:
        if pool.num_blocks > 10:
            monkeypatch.setattr(KVTensors, "write", misplace)
        fill(pool, value)

    monkeypatch.setattr(KVTensors, "fill_", break_then_fill)
    outcome = check("llama", dtype, "cpu", "reference", seed=0, deadline=inf)
    assert not outcome.ok
    assert outcome.error is not None
    assert outcome.tolerance is not None
    assert outcome.error > 3 * outcome.tolerance
    assert not outcome.note


def test_a_model_that_fails_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(ModelRunner, "run", explode)
    outcome = check("llama", torch.float32, "cpu", "auto", seed=0, deadline=inf)
    assert not outcome.ok
    assert outcome.note == "RuntimeError: no kernel image"


def test_the_matrix_is_that_of_the_families_served() -> None:
    assert len(ARCHITECTURES) >= 21
    assert VOCAB > 90
