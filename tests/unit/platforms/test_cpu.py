from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from asyncllm.config import DeviceConfig
from asyncllm.platforms.cpu import CpuPlatform, available_cores, available_memory_bytes

GIB = 1 << 30


class Machine:
    """Made-up /proc and /sys/fs/cgroup folders."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.write("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
        self.write("proc/self/statm", "1000 1 1 1 0 1 0\n")
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def memory(self) -> int:
        return available_memory_bytes(self.proc, self.cgroup)

    @property
    def cores(self) -> int:
        return available_cores(self.proc, self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_memory_without_cgroups_is_what_the_kernel_calls_available(machine: Machine) -> None:
    assert machine.memory == 8 * GIB


def test_memory_of_a_cgroup_v2_is_its_limit_less_its_use_and_its_cache_counts_as_free(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/app/engine\n")
    machine.write("cgroup/app/engine/memory.max", f"{3 * GIB}\n")
    machine.write("cgroup/app/engine/memory.current", f"{2 * GIB}\n")
    machine.write("cgroup/app/engine/memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    assert machine.memory == GIB + GIB // 2


def test_memory_of_the_tightest_enclosing_group_holds(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/app/engine\n")
    machine.write("cgroup/app/engine/memory.max", "max\n")
    machine.write("cgroup/app/memory.max", f"{GIB}\n")
    machine.write("cgroup/app/memory.current", "0\n")
    assert machine.memory == GIB


def test_memory_of_a_cgroup_v1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/box\n4:memory:/box\n0::/ignored\n")
    machine.write("cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    machine.write("cgroup/memory/box/memory.usage_in_bytes", f"{GIB}\n")
    machine.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")  # no limit
    assert machine.memory == GIB


def test_memory_is_never_negative(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("cgroup/memory.max", "100\n")
    machine.write("cgroup/memory.current", "200\n")
    assert machine.memory == 0


def test_memory_under_an_address_space_limit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (GIB, resource.RLIM_INFINITY))
    assert machine.memory == GIB - 1000 * resource.getpagesize()


def test_this_machine_has_memory_and_cores() -> None:
    assert available_memory_bytes() > 1 << 20
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_cores_under_a_quota_are_rounded_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    machine.write("proc/self/cgroup", "0::/app\n")
    machine.write("cgroup/app/cpu.max", quota + "\n")
    assert machine.cores == cores


def test_cores_under_a_v1_quota_of_a_parent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/box/inner\n")
    machine.write("cgroup/cpu/box/inner/cpu.cfs_quota_us", "-1\n")
    machine.write("cgroup/cpu/box/inner/cpu.cfs_period_us", "100000\n")
    machine.write("cgroup/cpu/box/cpu.cfs_quota_us", "300000\n")
    machine.write("cgroup/cpu/box/cpu.cfs_period_us", "100000\n")
    assert machine.cores == 3


def test_cores_of_the_affinity_mask(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5})
    assert machine.cores == 3


def test_the_option_for_threads_wins() -> None:
    assert CpuPlatform().num_threads(DeviceConfig(num_threads=7)) == 7
    assert CpuPlatform().num_threads(DeviceConfig()) == available_cores()


def test_the_dtype_is_float32_however_the_checkpoint_is_stored() -> None:
    assert {CpuPlatform().default_dtype(stored) for stored in ("bfloat16", "float16", "float32", None)} == {"float32"}
