"""The thread pool: forks, several callers, threads that sleep and end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncllm.kernels import library
from asyncllm.kernels.native import NativeKernels, NativePool

TASKS = Path("/proc/self/task")
needs_proc = pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")


def os_threads() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(isa: str, num_threads: int) -> None:
    kernels = NativeKernels(num_threads, isa)
    weight, x = kernels.pack(torch.randn(999, 64)), torch.randn(200, 64)
    expected = NativeKernels(1, isa).linear(x, weight)
    for _ in range(200):
        assert torch.equal(kernels.linear(x, weight), expected)


def test_two_callers_at_once_do_not_mix(isa: str) -> None:
    kernels = NativeKernels(2, isa)
    weight, x = kernels.pack(torch.randn(999, 64)), torch.randn(40, 64)
    expected = kernels.linear(x, weight)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(i for i in range(300) if not torch.equal(kernels.linear(x, weight), expected))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@needs_proc
def test_threads_start_with_the_first_call_and_end_with_the_pool(isa: str) -> None:
    before = os_threads()
    kernels = NativeKernels(4, isa)
    assert os_threads() <= before
    kernels.pack(torch.randn(999, 64))
    mine = os_threads() - before
    assert len(mine) == 3
    kernels.pool.close()
    wait_until(lambda: not mine & os_threads())  # a joined thread may linger in /proc for a moment


@needs_proc
def test_idle_threads_sleep(isa: str) -> None:
    before = os_threads()
    kernels = NativeKernels(2, isa)
    kernels.pack(torch.randn(999, 64))
    (worker,) = {task.name for task in TASKS.iterdir()} - before

    def state() -> str:
        return (TASKS / worker / "stat").read_text().rpartition(")")[2].split()[0]

    wait_until(lambda: state() == "S")
    del kernels


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


FORK = """
import os, sys, torch
from pathlib import Path
from asyncllm.kernels import library
library.library_dir = lambda: Path(sys.argv[2])
from asyncllm.kernels.native import NativeKernels
kernels = NativeKernels(2, sys.argv[1])
weight, x = kernels.pack(torch.randn(999, 64)), torch.randn(40, 64)
expected = kernels.linear(x, weight)
child = os.fork()
same = all(torch.equal(kernels.linear(x, weight), expected) for _ in range(50))
tasks = len(os.listdir("/proc/self/task"))
if child == 0:
    grandchild = os.fork()
    same = same and torch.equal(kernels.linear(x, weight), expected)
    if grandchild:
        same = same and os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    kernels.pool.close()
    os._exit(0 if same and tasks >= 2 else 1)
sys.exit(0 if same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else 1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@needs_proc
def test_a_forked_child_has_threads_of_its_own(isa: str, libraries: Path) -> None:
    command = [sys.executable, "-c", FORK, isa, str(libraries)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_proc
def test_workers_leave_signals_to_the_application(isa: str) -> None:
    before = os_threads()
    kernels = NativeKernels(2, isa)
    kernels.pack(torch.randn(999, 64))
    (worker,) = {task.name for task in TASKS.iterdir()} - before
    lines = (TASKS / worker / "status").read_text().splitlines()
    blocked = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))
    for number in (1, 2, 15):  # HUP, INT, TERM
        assert blocked & (1 << (number - 1))


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        NativePool(library.load(library.usable()[0]), 0)
