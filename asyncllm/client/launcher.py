"""Start an engine process and end it.

The process is exec'd (never forked, never spawned by ``multiprocessing``), in a session of its own, its output in a log
file. Two pipes tell the ends of each other: the engine's standard input is at end of file once the caller is dead,
``EngineProcess.death_fd`` once the engine is. No thread, no signal handler. Invariant: a process that was started is
reaped, and its folder removed, by whoever calls :meth:`EngineProcess.end`, however far the start came.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import msgspec
import zmq

from asyncllm import env
from asyncllm.client.runtime_dir import LOG_FILE, RuntimeDir
from asyncllm.client.sockets import EngineSockets, Readiness, bind_sockets
from asyncllm.errors import EngineStartError, UsageError
from asyncllm.wire.endpoints import ENDPOINTS_FILE

__all__ = ["EngineProcess"]

ENTRY_MODULE = "asyncllm.core.engine_core_proc"
TERMINATE_TIMEOUT_S = 1.0
"""What a process gets after SIGTERM; with the kill that follows, an engine is gone in well under two seconds."""
REAP_TIMEOUT_S = 0.5


class EngineProcess:
    """A running engine process with the caller's sockets, pipes and folder. One object per start.

    Launching takes a few milliseconds and does not wait for the process; every method but :meth:`end` returns at once.

    :raises EngineStartError: the process could not be started.
    :raises UsageError: there is no Python interpreter to start it with, or the system is not a POSIX one.
    """

    runtime_dir: RuntimeDir
    sockets: EngineSockets
    readiness: Readiness
    death_fd: int
    pid: int

    def __init__(self) -> None:
        if not sys.executable or os.name != "posix":
            raise UsageError(
                "an engine process needs a POSIX system and sys.executable; "
                "LLM(model, in_process=True) runs the engine in this process"
            )
        self.owner_pid = os.getpid()
        self.started_at = time.monotonic()
        try:
            self._set_up()
        except (OSError, zmq.ZMQError) as error:
            raise EngineStartError(
                f"the sockets, pipes and files of an engine process could not be made: {error}", phase="launch"
            ) from error
        self.pid = self._process.pid

    def _set_up(self) -> None:
        with contextlib.ExitStack() as undo:
            self.runtime_dir = RuntimeDir.create()
            undo.callback(self.runtime_dir.remove)
            self.sockets, endpoints = bind_sockets(self.runtime_dir.path)
            undo.callback(self.sockets.close)
            _write_private(self.runtime_dir.path / ENDPOINTS_FILE, msgspec.msgpack.encode(endpoints))
            self.death_fd, engine_end = os.pipe()
            undo.callback(os.close, self.death_fd)
            os.set_blocking(self.death_fd, False)
            try:
                self.readiness = Readiness((self.sockets.from_engine.FD, self.death_fd))
                undo.callback(self.readiness.close)
                self._process = self._launch(engine_end)
            finally:
                os.close(engine_end)
            undo.pop_all()

    def _launch(self, death_fd: int) -> subprocess.Popen[bytes]:
        folder = self.runtime_dir.path
        command = [sys.executable, "-P", "-m", ENTRY_MODULE, str(folder), str(self.owner_pid), str(death_fd)]
        log_fd = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log_fd,
                stderr=log_fd,
                bufsize=0,
                pass_fds=(death_fd,),
                start_new_session=True,
                env=env.engine_environment(_import_path()),
            )
        except OSError as error:
            raise EngineStartError(f"{command[0]!r} could not be started: {error}", phase="launch") from error
        finally:
            os.close(log_fd)

    # ------------------------------------------------------------------------------------------------ while it runs
    def has_ended(self) -> bool:
        """Return whether the process is gone (its end of the pipe is closed)."""
        try:
            os.read(self.death_fd, 1)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, ``None`` while it runs; reaps the process."""
        return self._process.poll()

    def terminate(self) -> None:
        """Ask the process to end after the step that is running (SIGTERM)."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and what it started in its session (SIGKILL)."""
        if self._process.returncode is None:  # not reaped, so that its id and its session's are still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------------ its end
    def end(self, *, grace_s: float = TERMINATE_TIMEOUT_S) -> None:
        """End the process, reap it, close the sockets and remove the folder. Idempotent, quiet, at most about 2 s.

        Blocks: for as long as the process takes to end, ``grace_s`` until it is killed (0: at once). Does nothing in a
        process forked from the owner.
        """
        if os.getpid() != self.owner_pid:
            return
        if self._process.poll() is None and grace_s > 0:
            self._process.terminate()
            self._close_stdin()
            self._wait(grace_s)
        self.kill()
        self._wait(REAP_TIMEOUT_S)
        self._close_stdin()
        if self.death_fd >= 0:
            self.readiness.close()
            os.close(self.death_fd)
            self.death_fd = -1
            self.sockets.close()
        self.runtime_dir.remove()

    def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _import_path() -> list[str]:
    """Return this process's import path, absolute, so that the engine imports the same modules in the same order."""
    entries = [entry for entry in sys.path if isinstance(entry, str) and os.pathsep not in entry]  # pyright: ignore[reportUnnecessaryIsInstance]
    try:
        return [os.path.abspath(entry) for entry in entries]
    except FileNotFoundError:  # the current folder was removed: nothing can be imported relative to it
        return [entry for entry in entries if os.path.isabs(entry)]


def _write_private(path: os.PathLike[str], data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
