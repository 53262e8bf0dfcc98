"""The CPU platform: memory and cores that this process may really use, by its cgroups, limits and affinity mask.

A container's limit is often far below what ``/proc/meminfo`` and ``os.cpu_count`` show; the smallest bound holds.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from asyncllm.platforms.base import Platform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.config import DeviceConfig

__all__ = ["CpuPlatform", "available_cores", "available_memory_bytes"]

KV_CACHE_CAP_BYTES = 4 << 30  # the machine belongs to the caller's application as well
UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


class CpuPlatform(Platform):
    """The host's cores and memory."""

    name: ClassVar[str] = "cpu"
    worker_cls: ClassVar[str] = "asyncllm.worker.worker.Worker"
    attention_backends: ClassVar[tuple[str, ...]] = ("native", "cpu", "reference")
    is_asynchronous: ClassVar[bool] = False

    def default_dtype(self, stored_as: str | None) -> str:
        """Return float32: equal to transformers in float32, and the fastest of torch's dtypes on most CPUs."""
        return "float32"

    def free_memory_bytes(self) -> int:
        """Return the memory that this process can still take, in bytes: the machine's or its cgroup's, the smaller."""
        return available_memory_bytes()

    def kv_cache_cap_bytes(self) -> int | None:
        """Return 4 GiB: a caller who wants more says so with ``kv_cache_bytes`` or ``num_blocks``."""
        return KV_CACHE_CAP_BYTES

    def num_threads(self, config: DeviceConfig) -> int:
        """Return the option, else the cores this process may use."""
        return config.num_threads or available_cores()


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes this process can still allocate without swapping or being killed.

    The smallest of the kernel's ``MemAvailable``, what each enclosing memory cgroup has left (its page cache counts as
    free: it is reclaimed first) and what ``RLIMIT_AS`` leaves.
    """
    bounds = [_mem_available(proc)]
    for limit_file, usage_file, stat_key, folder in _memory_groups(proc, cgroup):
        limit = _read_int(folder / limit_file)
        if limit is not None and limit < UNLIMITED_BYTES:
            used = _read_int(folder / usage_file) or 0
            bounds.append(limit - used + _stat_value(folder / "memory.stat", stat_key))
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        bounds.append(soft_limit - _virtual_size(proc))
    return max(min(bounds), 0)


def available_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores of the affinity mask, or what a CPU quota of an enclosing cgroup allows, if less; at least 1."""
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    for folder in _group_folders(proc, cgroup, "cpu"):
        words = _read_text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            cores = min(cores, int(words[0]) / int(words[1]))
        quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            cores = min(cores, quota / period)
    return max(math.ceil(cores), 1)


def _mem_available(proc: Path) -> int:
    for line in _read_text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_groups(proc: Path, cgroup: Path) -> Iterator[tuple[str, str, str, Path]]:
    """Yield (limit file, usage file, key of the reclaimable cache in memory.stat, folder) of each memory group."""
    for folder in _group_folders(proc, cgroup, "memory"):
        yield "memory.max", "memory.current", "inactive_file", folder
        yield "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", folder


def _group_folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups of ``controller``, v2 and v1, each with all its parents."""
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        # Inside a container the group may be mounted as the root while its outer path is what the kernel names.
        folder = root / path.strip().lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_dir():
                yield place
            if place == root:
                break


def _virtual_size(proc: Path) -> int:
    words = _read_text(proc / "self" / "statm").split()
    return int(words[0]) * resource.getpagesize() if words else 0


def _stat_value(file: Path, key: str) -> int:
    for line in _read_text(file).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read_int(file: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_read_text(file))
    return None


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
