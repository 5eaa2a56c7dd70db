import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config import ServeSettings
from server.kvpool.layout import CACHE_DTYPES, EVERYTHING, AttentionKind, CacheLayout, LayerLayout, Visibility
from server.model.errors import ModelLoadError
from server.model.memory import (
    CPU_SHARE,
    MemoryDivision,
    available_main_memory,
    divide_memory,
    host_blocks,
    readable,
    startup_report,
)
from server.scheduler.scheduler import Scheduler, SchedulerConfig

GQA = LayerLayout(AttentionKind.GQA, kv_heads=2, key_dim=8, value_dim=8)
LAYOUT = CacheLayout((GQA,) * 4, dtype=CACHE_DTYPES["float32"], block_size=16)
BLOCK = 2 * (8 + 8) * 4 * 4 * 16
GIB = 2**30


def divide(
    available: int,
    step: int = 0,
    device: str = "cuda",
    max_model_len: int = 1024,
    unpacked: int = 0,
    **settings: object,
) -> MemoryDivision:
    return divide_memory(
        ServeSettings.model_validate(settings),
        LAYOUT,
        device_type=device,
        weight_bytes=GIB,
        available_bytes=available,
        step_bytes=step,
        unpacked_bytes=unpacked,
        max_model_len=max_model_len,
    )


def refusal(available: int, **more: object) -> str:
    with pytest.raises(ModelLoadError) as caught:
        divide(available, **more)
    return str(caught.value)


def test_gpu_takes_its_share_of_what_weights_and_step_leave() -> None:
    division = divide(100 * BLOCK + 7, step=20 * BLOCK, gpu_memory_utilization=0.5)
    assert division.num_blocks == 40
    assert division.pool_bytes == 40 * BLOCK
    assert division.left_bytes == 40 * BLOCK + 7


def test_exact_sizes_are_exact() -> None:
    assert divide(100 * BLOCK, kv_blocks=32).num_blocks == 33
    assert divide(100 * BLOCK, kv_bytes=33 * BLOCK).num_blocks == 33
    assert divide(100 * BLOCK, kv_bytes=34 * BLOCK - 1).num_blocks == 33
    assert divide(100 * BLOCK, kv_blocks=99).left_bytes == 0


def test_cpu_takes_no_more_than_the_sequences_can_use() -> None:
    settings = {"device": "cpu", "max_num_seqs": 3, "max_model_len": 17}
    assert divide(10**6 * BLOCK, **settings).num_blocks == 1 + 3 * 2
    modest = divide(100 * BLOCK, step=20 * BLOCK, device="cpu")
    assert modest.num_blocks == 80 * CPU_SHARE


@given(
    available=st.integers(0, 400 * BLOCK),
    step=st.integers(0, 400 * BLOCK),
    device=st.sampled_from(["cpu", "cuda"]),
    asked=st.none()
    | st.tuples(st.just("kv_blocks"), st.integers(1, 500))
    | st.tuples(st.just("kv_bytes"), st.integers(1, 500 * BLOCK)),
    share=st.floats(0.01, 1),
)
def test_the_division_adds_up_or_is_refused(
    available: int, step: int, device: str, asked: tuple[str, int] | None, share: float
) -> None:
    settings: dict[str, object] = {"gpu_memory_utilization": share} | ({asked[0]: asked[1]} if asked else {})
    room = max(available - step, 0)
    try:
        division = divide(available, step, device, **settings)
    except ModelLoadError:
        asked_blocks = 0 if asked is None else asked[1] + 1 if asked[0] == "kv_blocks" else asked[1] // BLOCK
        part = share if device == "cuda" else CPU_SHARE
        assert asked_blocks * BLOCK > room or (asked_blocks < 2 and (asked or int(room * part) < 2 * BLOCK))
    else:
        assert division.num_blocks >= 2
        assert division.pool_bytes + step + division.left_bytes == available
        assert division.left_bytes >= 0


def test_what_a_step_unpacks_grows_with_the_cache() -> None:
    """A block that takes a quarter of its size to be unpacked in, with or without a size that was asked for."""
    division = divide(100 * BLOCK, step=20 * BLOCK, device="cpu", unpacked=BLOCK // 4)
    assert division.num_blocks == 80 * CPU_SHARE / 1.25
    assert division.step_bytes == 20 * BLOCK + division.num_blocks * BLOCK // 4
    assert division.pool_bytes + division.step_bytes + division.left_bytes == 100 * BLOCK
    assert divide(100 * BLOCK, device="cpu", unpacked=BLOCK // 4, kv_blocks=79).left_bytes == 0
    message = refusal(100 * BLOCK, device="cpu", unpacked=BLOCK // 4, kv_blocks=80)
    assert f"{readable(81 * BLOCK)} and {readable(81 * BLOCK // 4)} to unpack it in" in message
    assert f"at most --kv-blocks 79 or --kv-bytes {80 * BLOCK}" in message


def test_refusals_name_flag_number_and_what_is_possible() -> None:
    message = refusal(100 * BLOCK, step=10 * BLOCK, kv_blocks=90)
    assert "--kv-blocks asks for" in message
    assert f"at most --kv-blocks 89 or --kv-bytes {90 * BLOCK}" in message
    assert f"--kv-bytes is 5000, but the smallest pool takes {2 * BLOCK} bytes" in refusal(100 * BLOCK, kv_bytes=5000)
    assert "raise --gpu-memory-utilization, lower --max-num-batched-tokens" in refusal(3 * BLOCK, step=2 * BLOCK)
    assert "--gpu-memory-utilization" not in refusal(BLOCK, device="cpu")


def test_host_memory_takes_what_fits_and_no_more_than_there_is() -> None:
    def fits(asked: int | str, available: int) -> int:
        return host_blocks(ServeSettings.model_validate({"kv_host_memory": asked}), LAYOUT, available)

    def refused(asked: int | str, available: int) -> str:
        with pytest.raises(ModelLoadError) as caught:
            fits(asked, available)
        return str(caught.value)

    assert fits(0, 0) == host_blocks(ServeSettings(), LAYOUT, 0) == 0
    assert fits(BLOCK, 2 * BLOCK) == 1
    assert fits(9 * BLOCK, 10 * BLOCK) == 9, "a tenth stays free"
    assert fits(5 * BLOCK - 1, 50 * BLOCK) == 4
    assert fits("1GiB", 2 * GIB) == GIB // BLOCK
    assert f"--kv-host-memory is {BLOCK - 1}, but one block of 16 tokens takes {BLOCK}" in refused(BLOCK - 1, GIB)
    assert "asks for 1.0 GiB, but 40.0 KiB of main memory" in refused("1GiB", 5 * BLOCK)
    assert refused(10 * BLOCK, 10 * BLOCK).endswith(f"at most --kv-host-memory {9 * BLOCK}")
    assert refused(9 * BLOCK, -5 * BLOCK).endswith("at most --kv-host-memory 0")


def test_what_a_person_is_told_at_start() -> None:
    window = LayerLayout(AttentionKind.MQA, kv_heads=1, key_dim=8, value_dim=8)
    latent = LayerLayout(AttentionKind.MLA, kv_heads=1, key_dim=576, value_dim=0)
    layout = CacheLayout((GQA, window, GQA, latent), dtype=CACHE_DTYPES["bfloat16"], block_size=16)
    division = MemoryDivision(101, layout.bytes_per_block, GIB, 2 * GIB, GIB // 2, "--kv-blocks")
    report = startup_report("tiny", "bfloat16", "cuda:0", layout, [None, 1024, None, None], 320, division, limit=320)
    assert report == [
        "model   tiny, bfloat16 on cuda:0",
        "layers  2 x GQA (2 KV heads of 8), 1 x MQA (1 KV head of 8, window 1,024), 1 x MLA (1 KV head of 576)",
        "cache   bfloat16, 1,312 bytes a token, 100 blocks of 16 tokens: 1,600 tokens, 5 sequences of 320 tokens",
        "memory  weights 1.0 GiB, largest step 512.0 MiB, cache 2.0 MiB (--kv-blocks), 1.5 GiB left",
    ]
    with_host = startup_report(
        "tiny", "bfloat16", "cuda:0", layout, [None, 1024, None, None], 320, division, 2000, limit=999
    )
    assert with_host == [
        *report,
        "host    40.0 MiB of main memory: 2,000 more blocks, 32,000 tokens, for what the cache gives up",
    ]
    short = startup_report("tiny", "bfloat16", "cuda:0", layout, [None] * 4, 2000, division, limit=1584)
    assert "not one sequence of 2,000 tokens (the limit of a request is 1,584)" in short[2]
    few = startup_report("tiny", "bfloat16", "cuda:0", layout, [None] * 4, 2000, division, limit=2000, budget=64)
    assert "12 sequences of 2,000 tokens" in few[2]  # of 128 tokens each


def test_a_token_takes_a_place_in_a_block_of_each_group() -> None:
    layout = CacheLayout((GQA,) * 4, CACHE_DTYPES["float32"], 16, (EVERYTHING, Visibility(window=64)) * 2)
    division = MemoryDivision(101, layout.bytes_per_block, GIB, 2 * GIB, GIB // 2, "--kv-blocks")
    report = startup_report("tiny", "float32", "cpu", layout, [None, 64] * 2, 320, division, 40, limit=320)
    assert "100 blocks of 16 tokens: 800 tokens, 4 sequences of 320 tokens" in report[2]
    assert "40 more blocks, 320 tokens" in report[4]


def test_cpu_leaves_room_for_a_step_beside_a_window() -> None:
    layout = CacheLayout((GQA,), CACHE_DTYPES["float32"], 16, (Visibility(window=32),))
    settings = ServeSettings(max_num_seqs=1, max_num_batched_tokens=128)
    sizes = {"weight_bytes": GIB, "available_bytes": GIB, "step_bytes": 0, "unpacked_bytes": 0}
    division = divide_memory(settings, layout, device_type="cpu", **sizes, max_model_len=10**6)
    limits = SchedulerConfig(16, division.num_blocks - 1, 1, 128, groups=layout.visibilities)
    assert Scheduler(limits).capacity_tokens >= 10**6


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (-(2**21), "-2.0 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_readable(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


# Main memory, as Linux tells it


def linux(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": membership} | files
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    cgroups.mkdir(exist_ok=True)
    return proc, cgroups


def test_machine_without_limits(tmp_path: Path) -> None:
    assert available_main_memory(*linux(tmp_path, "0::/\n", {})) == 8000 * 1024


def test_limit_of_a_container_version_2(tmp_path: Path) -> None:
    files = {
        "cgroup/pod/app/memory.max": "max",
        "cgroup/pod/app/memory.current": "300",
        "cgroup/pod/app/memory.stat": "anon 5\ninactive_file 50",
        "cgroup/pod/memory.max": "1000",
        "cgroup/pod/memory.current": "400",
        "cgroup/pod/memory.stat": "anon 5\ninactive_file 100\n",
    }
    assert available_main_memory(*linux(tmp_path, "0::/pod/app\n", files)) == 1000 - 400 + 100


def test_limit_of_a_container_version_1(tmp_path: Path) -> None:
    files = {
        "cgroup/memory/app/memory.limit_in_bytes": "1000",
        "cgroup/memory/app/memory.usage_in_bytes": "900",
        "cgroup/memory/app/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
        "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "cgroup/memory/memory.usage_in_bytes": "5000",
        "cgroup/memory/memory.stat": "total_inactive_file 0\n",
    }
    assert available_main_memory(*linux(tmp_path, "4:memory:/app\n1:cpu:/app\n", files)) == 130


def test_limit_that_is_used_up(tmp_path: Path) -> None:
    files = {
        "cgroup/memory.max": "1000",
        "cgroup/memory.current": "1400",
        "cgroup/memory.stat": "inactive_file 100\n",
    }
    assert available_main_memory(*linux(tmp_path, "0::/\n", files)) == 0


def test_this_machine() -> None:
    match = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert match is not None
    assert 0 < available_main_memory() <= int(match[1]) * 1024
