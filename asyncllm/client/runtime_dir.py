"""The private folder of one engine: its sockets and its log.

A folder is named after the process that owns it and holds a lock file that the owner keeps locked while it lives, so
that folders of dead owners can be told from living ones whatever became of their process ids. Invariant: nothing here
ever removes a folder whose lock is held, or that another user owns.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from asyncllm import env
from asyncllm.errors import EngineStartError

__all__ = ["LOG_FILE", "RuntimeDir"]

PREFIX = "asyncllm-"
LOCK_FILE = "lock"
LOG_FILE = "engine.log"
NEWBORN_S = 60.0
"""A folder without a lock may be one whose owner is just about to lock it; past this age it is not."""


class RuntimeDir:
    """A new private folder (mode 0700), locked by this process until :meth:`remove`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._owner = os.getpid()

    @classmethod
    def create(cls) -> RuntimeDir:
        """Return a new folder; those of owners that died are removed first.

        :raises EngineStartError: the parent folder does not exist or cannot be written.
        :raises OSError: there is no temporary folder at all, or no space or descriptor for the lock.
        """
        parent = env.runtime_dir() or Path(tempfile.gettempdir())
        sweep(parent)
        try:
            path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        except OSError as error:
            raise EngineStartError(
                f"no folder for the engine's sockets can be made in {str(parent)!r} ({error.strerror}); "
                "set ASYNCLLM_RUNTIME_DIR to one that can be written",
                phase="runtime_dir",
            ) from error
        try:
            return cls(path, _lock(path / LOCK_FILE))
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder with all in it. Idempotent; does nothing in a process forked from the owner."""
        if self._lock_fd < 0 or os.getpid() != self._owner:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def log_tail(self, num_lines: int = 20, num_bytes: int = 8192) -> str:
        """Return the last lines that the engine process wrote, empty if there are none."""
        try:
            with (self.path / LOG_FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.rstrip().splitlines()[-num_lines:])


def sweep(parent: Path) -> None:
    """Remove the folders below ``parent`` whose owner is dead. Never raises."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(PREFIX):
                with contextlib.suppress(OSError, ValueError):
                    _remove_if_stale(parent / name, owner=int(name.split("-")[1]))


def _remove_if_stale(path: Path, owner: int) -> None:
    """Remove ``path`` if nobody holds its lock; lock and removal are one step for other sweepers and for its owner."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    if time.time() - status.st_mtime < NEWBORN_S and _process_lives(owner):
        return
    try:
        lock_fd = _lock(path / LOCK_FILE)
    except BlockingIOError:
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock_fd)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock; it is free again when the last process that has it open ends.

    :raises BlockingIOError: another one holds it.
    """
    import fcntl  # not on Windows, where the launcher refuses with better words

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
