"""How the memory of a device is divided between weights, the largest step and the KV pool, said in words."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from server.config import ServeSettings
from server.kvpool.layout import CacheLayout, LayerLayout
from server.kvpool.sizing import most_tokens_held
from server.model.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

CPU_SHARE = 0.25
"""Of the main memory still free, how much the pool takes by default: other programs live there too."""

HOST_SHARE = 0.9
"""Of the main memory still free, how much the second tier may take: what is free changes from moment to moment."""


@dataclass(frozen=True, slots=True)
class MemoryDivision:
    """Where the memory of a device goes, all sizes in bytes.

    num_blocks: blocks of the pool, the trash block included.
    available_bytes: free once the weights are loaded; step_bytes: of it, what the largest step takes at its peak, what
        it unpacks of the cache included.
    reason: what fixed the size of the pool, in words.
    """

    num_blocks: int
    block_bytes: int
    weight_bytes: int
    available_bytes: int
    step_bytes: int
    reason: str

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def left_bytes(self) -> int:
        return self.available_bytes - self.step_bytes - self.pool_bytes

    def __str__(self) -> str:
        return (
            f"weights {readable(self.weight_bytes)}, largest step {readable(self.step_bytes)}, "
            f"cache {readable(self.pool_bytes)} ({self.reason}), {readable(self.left_bytes)} left"
        )


def divide_memory(
    settings: ServeSettings,
    layout: CacheLayout,
    *,
    device_type: str,
    weight_bytes: int,
    available_bytes: int,
    step_bytes: int,
    unpacked_bytes: int,
    max_model_len: int,
) -> MemoryDivision:
    """Size the pool: exactly as `--kv-blocks` or `--kv-bytes` say, else by the memory there is.

    On a GPU it takes `--gpu-memory-utilization` of what weights and the largest step leave. On a CPU it takes
    CPU_SHARE of that, but no more than max_num_seqs sequences of max_model_len tokens can use.
    step_bytes: what the largest step takes but for the cache that it unpacks, which is up to unpacked_bytes a block.
    Raises ModelLoadError where not one block for a sequence fits beside the trash block, or where the size asked for
    is more than there is.
    """
    block = layout.bytes_per_block
    with_step = block + unpacked_bytes
    room = max(available_bytes - step_bytes, 0)
    if settings.kv_blocks is not None:
        num_blocks, reason = settings.kv_blocks + 1, "--kv-blocks"
    elif settings.kv_bytes is not None:
        num_blocks, reason = settings.kv_bytes // block, "--kv-bytes"
        if num_blocks < 2:
            raise ModelLoadError(
                f"--kv-bytes is {settings.kv_bytes}, but the smallest pool takes {2 * block} bytes: one block of "
                f"{layout.block_size} tokens and one for padding, {readable(block)} each"
            )
    elif device_type == "cuda":
        share = settings.gpu_memory_utilization
        num_blocks = int(room * share) // with_step
        reason = f"{share:.0%} of what they leave"
    else:
        limits = settings.step_limits(device_type)
        # With the blocks of a step's own tokens, or a prompt longer than a window would not fit a pool for windows.
        most = 1 + limits.max_num_seqs * layout.blocks_for(max_model_len, limits.max_num_batched_tokens)
        num_blocks = min(int(room * CPU_SHARE) // with_step, most)
        reason = "all that the sequences can use" if num_blocks == most else f"{CPU_SHARE:.0%} of what they leave"
    if num_blocks * with_step > room:
        most_blocks = room // with_step
        unpacked = f" and {readable(num_blocks * unpacked_bytes)} to unpack it in" if unpacked_bytes else ""
        raise ModelLoadError(
            f"{reason} asks for a cache of {readable(num_blocks * block)}{unpacked}, but weights and the largest step "
            f"leave {readable(room)}: at most --kv-blocks {max(most_blocks - 1, 0)} or --kv-bytes {most_blocks * block}"
        )
    if num_blocks < 2:
        flag = "raise --gpu-memory-utilization, " if device_type == "cuda" else ""
        raise ModelLoadError(
            f"no room for a cache: {readable(available_bytes)} is free beside the weights, the largest step takes "
            f"{readable(step_bytes)} of it, and the smallest cache is {readable(2 * block)}: {flag}lower "
            "--max-num-batched-tokens or --max-num-seqs, or free memory"
        )
    step_bytes += num_blocks * unpacked_bytes
    return MemoryDivision(num_blocks, block, weight_bytes, available_bytes, step_bytes, reason)


def host_blocks(settings: ServeSettings, layout: CacheLayout, available_bytes: int) -> int:
    """Blocks of the second tier that `--kv-host-memory` has room for; 0 where it is not set.

    available_bytes: main memory that nothing else will take.
    Raises ModelLoadError where not one block fits, or where more is asked for than is available.
    """
    asked, block = settings.kv_host_memory, layout.bytes_per_block
    if not asked:
        return 0
    if asked < block:
        raise ModelLoadError(
            f"--kv-host-memory is {asked}, but one block of {layout.block_size} tokens takes {block} bytes "
            f"({readable(block)}): give at least so much, or leave it out"
        )
    room = int(available_bytes * HOST_SHARE)
    if asked // block * block > room:
        raise ModelLoadError(
            f"--kv-host-memory asks for {readable(asked)}, but {readable(available_bytes)} of main memory is left, of "
            f"which it may take {HOST_SHARE:.0%}: at most --kv-host-memory {max(room, 0) // block * block}"
        )
    return asked // block


def startup_report(
    name: str,
    dtype: str,
    device: str,
    layout: CacheLayout,
    windows: Sequence[int | None],
    max_model_len: int,
    division: MemoryDivision,
    num_host_blocks: int = 0,
    *,
    limit: int,
    budget: int | None = None,
) -> list[str]:
    """What a person wants to know when a server starts, a line each.

    windows: for each layer, how many tokens back it looks, None for all.
    num_host_blocks: blocks of the second tier, in main memory.
    limit: tokens of the longest request that the pool can serve; may be beyond max_model_len.
    budget: most tokens that the cache keeps of each, None for all.
    """
    groups = len(layout.groups)  # a token takes a place in a block of each
    tokens = (division.num_blocks - 1) // groups * layout.block_size
    held = most_tokens_held(max_model_len, budget, layout.block_size)
    sequences = (division.num_blocks - 1) // layout.blocks_for(held)
    fits = (
        f"{sequences:,} sequence{'s' if sequences > 1 else ''} of {max_model_len:,} tokens"
        if limit >= max_model_len
        else f"not one sequence of {max_model_len:,} tokens (the limit of a request is {limit:,})"
    )
    lines = [
        f"model   {name}, {dtype} on {device}",
        f"layers  {_layer_kinds(layout.layers, windows)}",
        f"cache   {layout.dtype.name}, {layout.bytes_per_token:,} bytes a token, {division.num_blocks - 1:,} blocks of "
        f"{layout.block_size} tokens: {tokens:,} tokens, {fits}",
        f"memory  {division}",
    ]
    if num_host_blocks:
        lines.append(
            f"host    {readable(num_host_blocks * layout.bytes_per_block)} of main memory: {num_host_blocks:,} more "
            f"blocks, {num_host_blocks // groups * layout.block_size:,} tokens, for what the cache gives up"
        )
    return lines


def _layer_kinds(layers: Sequence[LayerLayout], windows: Sequence[int | None]) -> str:
    """'12 x GQA (8 KV heads of 128), 12 x GQA (8 KV heads of 128, window 4,096)'."""
    return ", ".join(
        f"{count} x {_layer_kind(layer, window)}"
        for (layer, window), count in Counter(zip(layers, windows, strict=True)).items()
    )


def _layer_kind(layer: LayerLayout, window: int | None) -> str:
    widths = {layer.key_dim, layer.value_dim} - {0}
    width = str(widths.pop()) if len(widths) == 1 else f"{layer.key_dim} and {layer.value_dim}"
    heads = f"{layer.kv_heads} KV head{'s' if layer.kv_heads > 1 else ''} of {width}"
    return f"{layer.kind.value} ({heads}{'' if window is None else f', window {window:,}'})"


def readable(nbytes: int) -> str:
    """'1.5 GiB'; bytes are exact."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{nbytes:,} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def available_memory(device: torch.device) -> int:
    """Bytes that an allocation on `device` may still take."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_main_memory()


def available_main_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of main memory that this process may still take: the machine's, or what its control group leaves.

    A container's limit is no less real for being invisible in /proc/meminfo: past it the process is killed.
    """
    if not (proc / "meminfo").exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no Linux: half of what there is
    meminfo = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    return min([free, *_cgroup_room(proc, cgroups)])


def _cgroup_room(proc: Path, cgroups: Path) -> list[int]:
    """What each limit leaves, of version 1 and 2, of this process's group and of all groups above it."""
    membership = proc / "self" / "cgroup"
    if not membership.exists():
        return []
    room = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            if (limit := _number(directory / names[0])) is not None and (
                used := _number(directory / names[1])
            ) is not None:
                room.append(max(limit - used + _reclaimable(directory), 0))
            if directory == top:
                break
    return room


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says 'max'."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _reclaimable(group: Path) -> int:
    """File cache that the kernel drops before it refuses memory; a group's usage includes it."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
