"""End this process when its parent does, whatever it is doing. Standard library only: it starts before other imports.

The parent holds the other end of our standard input: end of file means that it is dead, SIGKILL included. Since a fork
of the parent may hold that end too, the parent's process id is looked at as well. (``PR_SET_PDEATHSIG`` is no help: it
fires when the *thread* that started us ends.) Invariant: within a second and a half of the parent's death this process
and the private folder are gone.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ParentWatch"]

POLL_S = 0.5
GRACE_S = 0.75
"""What the busy loop gets to end by itself, so that workers and devices are let go in order."""
EXIT_CODE = 1


class ParentWatch:
    """Watches from the moment it is made, in a thread of its own: the main thread may be deep in an import or a load.

    Takes file descriptor 0 for itself, and leaves ``/dev/null`` there.
    """

    def __init__(self, parent_pid: int, runtime_dir: str) -> None:
        self.is_orphaned = False
        self._parent_pid = parent_pid
        self._runtime_dir = runtime_dir
        self._on_orphaned: Callable[[], None] | None = None
        self._has_ended = threading.Event()
        self._pipe = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._thread = threading.Thread(target=self._run, name="asyncllm-parent-watch", daemon=True)
        self._thread.start()

    def on_orphaned(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` (in the watching thread) when the parent dies, and wait a little for :meth:`exit`."""
        self._on_orphaned = callback

    def exit(self, exit_code: int) -> NoReturn:
        """End this process now, without the interpreter's own slow and fallible farewell."""
        if self.is_orphaned:
            self._has_ended.set()
            self._thread.join()
        os._exit(exit_code)

    def _run(self) -> None:
        while os.getppid() == self._parent_pid:
            readable, _, _ = select.select([self._pipe], [], [], POLL_S)
            if readable and not os.read(self._pipe, 4096):
                break
        self.is_orphaned = True
        callback = self._on_orphaned
        if callback is not None:
            callback()
            self._has_ended.wait(GRACE_S)
        shutil.rmtree(self._runtime_dir, ignore_errors=True)
        os._exit(EXIT_CODE)
