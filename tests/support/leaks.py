"""See what a test leaves behind: child processes, threads, file descriptors, socket folders, shared memory.

Things that end by themselves (a child being reaped, a thread returning) get a moment; what is still there then is a
leak.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Threads of other libraries that live as long as the process, by the start of their name.
THREADS_THAT_STAY = ("asyncio_", "AnyIO worker", "Trio thread", "pytest_timeout", "tokenizers", "ThreadPoolExecutor")


def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether ``holds()`` became true in ``timeout_s``; for what no event announces (the end of a process)."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def children() -> list[int]:
    """Return the living descendants of this process; zombies count only until they are reaped here."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return sorted(found)


def describe(pid: int) -> str:
    """Return the command line of ``pid`` for a failure message."""
    try:
        return f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}"
    except psutil.Error:
        return f"{pid}: gone"


def process_lives(pid: int) -> bool:
    """Return whether ``pid`` is a running process (a zombie is not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def threads() -> list[str]:
    """Return the names of this process's Python threads, those of event loops' pools left out."""
    names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return sorted(name for name in names if not name.startswith(THREADS_THAT_STAY))


def file_descriptors() -> dict[int, str]:
    """Return the open descriptors and what each one is."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
    return found


def files(*folders: Path) -> set[str]:
    """Return every path below ``folders``."""
    return {str(path) for folder in folders if folder.is_dir() for path in folder.rglob("*")}


@dataclass
class Traces:
    """What a process holds at one moment."""

    children: set[int]
    threads: list[str]
    num_file_descriptors: int
    files: set[str]

    @classmethod
    def now(cls, *folders: Path) -> Traces:
        """Take stock, after a garbage collection."""
        gc.collect()
        return cls(set(children()), threads(), len(file_descriptors()), files(*folders))

    def new_since(self, before: Traces) -> list[str]:
        """Return what is here and was not ``before``, in words; empty if nothing is."""
        said = [f"process {describe(pid)}" for pid in sorted(self.children - before.children)]
        extra = list(self.threads)
        for name in before.threads:
            with contextlib.suppress(ValueError):
                extra.remove(name)
        said += [f"thread {name}" for name in extra]
        if self.num_file_descriptors > before.num_file_descriptors:
            listed = sorted(set(file_descriptors().values()))
            said.append(f"{self.num_file_descriptors - before.num_file_descriptors} file descriptors, now {listed}")
        said += [f"file {path}" for path in sorted(self.files - before.files)]
        return said


@contextlib.contextmanager
def no_leaks(*folders: Path, timeout_s: float = 5.0) -> Iterator[None]:
    """Assert that the body leaves behind no process, thread, descriptor or file below ``folders``."""
    before = Traces.now(*folders)
    gc.freeze()  # collections look at what the body makes only: with torch imported, each is a second shorter
    left: list[str] = []

    def nothing_left() -> bool:
        left[:] = Traces.now(*folders).new_since(before)
        return not left

    try:
        yield
        wait_until(nothing_left, timeout_s)
    finally:
        gc.unfreeze()
    assert not left, "left behind: " + "; ".join(left)
