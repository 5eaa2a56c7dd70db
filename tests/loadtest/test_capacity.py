"""The count of what runs at once: its arithmetic, its table, and the whole of it on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.capacity import BLOCK, Sample, Task, Turn, main, report, run, table
from server.bench.client import BenchError
from tests.tiny_checkpoint import save_tiny_checkpoint

TASK = Task(fits=4, tokens=768, answer=64, budget=192)
WHOLE = Turn("whole cache", 4, 12, 1.0, 0, 0, 0, 61.24)


def with_budget(running: int) -> Turn:
    return Turn("H2O of 192", running, 5, 0.97, 1, 512, 8192, 40.0)


def test_the_pool_holds_exactly_so_many_whole_requests() -> None:
    assert TASK.blocks == 4 * 48
    assert Task(4, 769, 64, 192).blocks == 4 * 49
    assert TASK.offered == 16
    prompts = TASK.prompts()
    assert [len(prompt) for prompt in prompts] == [704] * 16
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts}) == 16  # or the prefix cache would share their blocks


@pytest.mark.parametrize(
    ("budget", "most"),
    [
        (192, 192 // 16),  # 192 tokens and 64 on top, in 16 blocks
        (100, 192 // 11),  # 164 tokens
        (384, 192 // 30),  # the slack is a quarter of the budget
        (4096, 4),  # never outgrown
    ],
)
def test_how_many_fit_with_a_budget(budget: int, most: int) -> None:
    assert Task(4, 768, 64, budget).most_with_budget == most


def test_a_page_of_metrics_is_read() -> None:
    text = """\
# TYPE sluice_requests_running gauge
sluice_requests_running{model_name="m"} 7
# TYPE sluice_requests_waiting gauge
sluice_requests_waiting{model_name="m"} 9
# TYPE sluice_kv_cache_usage_ratio gauge
sluice_kv_cache_usage_ratio{model_name="m"} 0.75
# TYPE sluice_kv_cache_capacity_blocks gauge
sluice_kv_cache_capacity_blocks{model_name="m"} 192
# TYPE sluice_preemptions counter
sluice_preemptions_total{model_name="m"} 2
# TYPE sluice_kv_cache_evicted_blocks counter
sluice_kv_cache_evicted_blocks_total{cause="h2o",model_name="m"} 40
sluice_kv_cache_evicted_blocks_total{cause="prefix_lru",model_name="m"} 3
"""
    assert Sample.read(text) == Sample(7, 9, 0.75, 192, 2, {"h2o": 40, "prefix_lru": 3})
    with pytest.raises(BenchError, match="has no sluice_preemptions_total"):
        Sample.read(text.replace("sluice_preemptions", "sluice_other"))


@pytest.mark.parametrize(("running", "shown"), [(8, False), (9, True)])
def test_more_than_twice_as_many_is_what_is_to_be_shown(
    running: int, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(TASK, [WHOLE, with_budget(running)]) == shown
    words = capsys.readouterr().out
    assert "16 requests of 768 tokens, 64 of them generated, before a pool of 192 blocks" in words
    assert f"{running} ran at once, {'more' if shown else 'NOT more'} than twice 4" in words


def test_the_table_shows_both_turns() -> None:
    _, whole, budget = (line.split() for line in table([WHOLE, with_budget(11)]).splitlines())
    assert whole == ["whole", "cache", "4", "12", "100%", "0", "0", "0", "61.2"]
    assert budget == ["H2O", "of", "192", "11", "5", "97%", "1", "512", "8,192", "40.0"]


def test_a_budget_that_cannot_show_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--budget", "384"])
    assert "with --budget 384 the pool holds 6 requests" in capsys.readouterr().err


async def test_a_server_runs_more_than_twice_as_many_with_a_budget(tmp_path: Path) -> None:
    task = Task(fits=2, tokens=480, answer=128, budget=32)
    whole, budget = await run(task, [str(save_tiny_checkpoint(tmp_path))])
    assert (whole.running, whole.evicted, whole.evicted_tokens) == (2, 0, 0)
    assert budget.running > 4
    assert report(task, [whole, budget])
    # 479 tokens are computed, and 64 dropped each time that 96 are there.
    assert budget.evicted_tokens == 8 * 6 * 64
    assert budget.evicted == 8 * 6 * 4
