"""One engine of a comparison in a process of its own: start it, ask it, halt it while another one has its turn.

An engine that is halted (SIGSTOP, the process and all that it started) takes no processor time, whatever its threads
do while they wait. Memory is what the kernel says of each process at its highest; pages that two of them share, such as
those of a mapped file or of a library, count in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

DRIVERS = Path(__file__).resolve().parent / "peers"
MAX_LINE_BYTES = 1 << 26
END_S = 20.0


class EngineFailed(Exception):
    """The engine did not do what was asked; the message says what its log says."""


class EngineProcess:
    """The driver ``peers/drive_ENGINE.py`` under ``python``; what it and its libraries print goes to ``log``."""

    def __init__(self, engine: str, python: str, log: Path) -> None:
        self._command = [python, str(DRIVERS / f"drive_{engine}.py")]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._tree: dict[int, psutil.Process] = {}

    async def start(self, settings: dict[str, Any], *, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """Start it and return what it says once it is ready, with ``ready_s`` since the process was created.

        :raises EngineFailed: it ended, or was not ready in time.
        """
        begun = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
            )
        ready = await self.ask(settings, timeout_s=timeout_s)
        return ready | {"ready_s": time.perf_counter() - begun}

    async def ask(self, question: dict[str, Any], *, timeout_s: float) -> Any:
        """Return its answer.

        :raises EngineFailed: it ended, or did not answer in time.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it ended; the empty answer says so
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise EngineFailed(f"no answer within {timeout_s:.0f} s; {self._last_words()}") from None
        if not line:
            raise EngineFailed(f"it ended; {self._last_words()}")
        return json.loads(line)

    def halt(self) -> None:
        """Stop all its processes; they go on at :meth:`go_on`."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def go_on(self) -> None:
        """Let it run again."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def tree(self) -> list[psutil.Process]:
        """Return its living processes: the driver and what that started, also what lost its parent since."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.Error):
            root = self._tree.setdefault(self._process.pid, psutil.Process(self._process.pid))
            self._tree |= {process.pid: process for process in root.children(recursive=True)}
        self._tree = {pid: process for pid, process in self._tree.items() if process.is_running()}
        return list(self._tree.values())

    def cpu_s(self) -> float:
        """Return the processor time that its processes have used."""
        used = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                used += sum(process.cpu_times()[:4])  # user and system, of itself and of children that ended
        return used

    def peak_rss_bytes(self) -> list[int]:
        """Return the highest resident size of each process, the largest first."""
        peaks: list[int] = []
        for process in self.tree():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                peaks.append(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
        return sorted(peaks, reverse=True)

    async def end(self) -> None:
        """Close it; kill what is left of it after a while."""
        root = self._process
        if root is None or root.stdin is None:
            return
        self.go_on()
        root.stdin.close()
        processes = self.tree()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(root.wait(), END_S)
        _, left = await asyncio.to_thread(psutil.wait_procs, processes, timeout=2.0)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await root.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the end of its log: {' | '.join(lines[-6:])[-800:]}" if lines else "its log is empty"


class OtherLoad:
    """How many processors programs other than ``engine`` and this one kept busy while the block ran, on average."""

    cpus = 0.0

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    def __enter__(self) -> OtherLoad:
        self._begun, self._others = time.perf_counter(), self._others_s()
        return self

    def __exit__(self, *_exc: object) -> None:
        others = self._others_s() - self._others
        self.cpus = max(0.0, others / (time.perf_counter() - self._begun))

    def _others_s(self) -> float:
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
        return busy - self._engine.cpu_s() - time.process_time()
