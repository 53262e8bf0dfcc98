"""The client of applications with an event loop: asyncio, uvloop or trio.

Nothing is bound to a loop but what a call makes on its way in, so the same client serves one event loop after another.
One task is the reader (:meth:`AsyncMPClient.recv`); it also answers the utility calls of others. Invariant: no message
is held across an await, so cancelling any of these calls loses nothing.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from asyncllm.client.connection import EngineConnection
from asyncllm.client.launcher import TERMINATE_TIMEOUT_S
from asyncllm.client.mp import WATCH_S, MPClient
from asyncllm.errors import UsageError

if TYPE_CHECKING:
    from asyncllm.client.base import ReportStartup
    from asyncllm.config import EngineConfig
    from asyncllm.wire.messages import EngineCoreOutputs, EngineInfo

__all__ = ["AsyncMPClient"]

MAX_BURST_S = 0.001
"""How long a flood may keep other tasks of the loop waiting."""


class AsyncMPClient(MPClient):
    """Sends from any thread; awaits in the event loop that has the reader."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._last_rest_at = 0.0

    # ---------------------------------------------------------------------------------------------------- start and end
    async def start(self, report: ReportStartup | None = None) -> EngineInfo:
        """Start the engine process and return what it found out, once it is ready.

        ``report(phase, fraction)`` is called as the start-up proceeds. Cancellation, like any failure, kills the
        process and leaves nothing; :meth:`start` may then be called again.

        :raises EngineStartTimeoutError: not ready within ``startup_timeout_s``.
        :raises EngineStartError: the process could not be started or ended; typed errors of the engine (``ModelError``,
            ``InsufficientMemoryError`` …) come as themselves.
        :raises ConfigError: an option is not plain data.
        :raises UsageError: it was started already.
        """
        if self._connection is not None:
            raise UsageError("this client was started already")
        connection = self._connection = EngineConnection(self._config, "await llm.start() starts a new one")
        finalizer = self._finalizer = weakref.finalize(self, connection.close, grace_s=TERMINATE_TIMEOUT_S)
        try:
            with anyio.move_on_after(connection.startup_timeout_s):
                self.info = await self._wait_until_ready(connection, report)
                self._is_ready = True
            if not self._is_ready:
                raise connection.startup_timed_out()
        except BaseException:
            self._connection = None
            connection.close(grace_s=0)
            finalizer.detach()
            raise
        return self.info

    async def _wait_until_ready(self, connection: EngineConnection, report: ReportStartup | None) -> EngineInfo:
        while True:
            info = connection.next_startup_step(report)
            if info is not None:
                return info
            if connection.process.has_ended():
                await anyio.sleep(WATCH_S)  # for the rest of what it sent
            else:
                await _wait_readable(connection)

    async def aclose(self) -> None:
        """End the engine and leave nothing behind: ask, after ``shutdown_timeout_s`` terminate, then kill.

        Requests in flight are dropped, pending utility calls fail. Idempotent, also after a failed start. Cancellation
        does not shorten it (a native ``asyncio`` cancel does: the process is then killed at once).
        """
        connection = self._connection
        if connection is None:
            return
        try:
            with anyio.CancelScope(shield=True):
                connection.request_shutdown()
                await _wait_for_end(connection, connection.shutdown_timeout_s if self._is_ready else 0)
                connection.mark_closed()
                fd = connection.process.readiness.fileno()
                if fd >= 0:
                    anyio.notify_closing(fd)  # the reader, should it still wait, leaves before the descriptor does
                    await anyio.lowlevel.checkpoint()
        finally:
            connection.close(grace_s=0)
            if self._finalizer is not None:
                self._finalizer.detach()

    @property
    def is_dead(self) -> bool:
        """Return whether the engine's death was noticed, or the client is closed."""
        return self._connection is not None and self._connection.is_dead

    def check_owner(self) -> None:
        """Return in the process that started the engine, and where none was started.

        :raises UsageError: this is a fork of it.
        """
        if self._connection is not None:
            self._connection.check_owner()

    # -------------------------------------------------------------------------------------------------------- receiving
    async def recv(self) -> EngineCoreOutputs:
        """Return the outputs of the next step. For one task at a time: the reader.

        On a flood it lets other tasks run about every millisecond. Cancellation loses nothing.

        :raises EngineDeadError: the engine ended or was closed; all that it sent was returned before.
        """
        connection = self._started()
        if time.perf_counter() - self._last_rest_at > MAX_BURST_S:
            await self._rest()
        while True:
            outputs = connection.next_outputs()
            if outputs is not None:
                return outputs
            connection.raise_if_dead()
            if connection.is_ending():
                outputs = await self._last_outputs(connection)
                if outputs is not None:
                    return outputs
            else:
                await _wait_readable(connection)
                self._last_rest_at = time.perf_counter()

    async def _rest(self) -> None:
        await anyio.lowlevel.checkpoint()
        self._last_rest_at = time.perf_counter()

    async def _last_outputs(self, connection: EngineConnection) -> EngineCoreOutputs | None:
        """Return one more message of an engine that has ended; after the last one, tell how it ended."""
        drained = connection.has_drained()
        outputs = connection.next_outputs()
        if outputs is None and drained:
            connection.bury()
            raise connection.death_error()
        if outputs is None:
            await anyio.sleep(WATCH_S)
        return outputs

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Call ``EngineCore.<method>(*args)`` in the engine between two steps and return its value.

        The reader has to be running, in the same event loop. Cancellation drops the call: it still runs in the engine,
        its answer is ignored.

        :raises UtilityError: it failed there (typed errors of this package come as themselves).
        :raises EngineDeadError: the engine is gone, or ended before it answered.
        """
        connection = self._started()
        answered = anyio.Event()
        call = connection.call(method, args, answered.set)
        try:
            await answered.wait()
        finally:
            connection.drop(call)
        return call.result()


async def _wait_readable(connection: EngineConnection) -> None:
    """Wait until there is something to read, or the connection is closed."""
    try:
        await anyio.wait_readable(connection.process.readiness)
    except (anyio.ClosedResourceError, ValueError, OSError):  # closed while, or just before, it waited
        if not connection.is_dead:
            raise


async def _wait_for_end(connection: EngineConnection, timeout_s: float) -> None:
    """Wait until the process has ended: by itself for ``timeout_s``, then by SIGTERM. The caller kills what is left."""
    with anyio.move_on_after(timeout_s):
        await _watch(connection)
        return
    connection.process.terminate()
    with anyio.move_on_after(TERMINATE_TIMEOUT_S):
        await _watch(connection)


async def _watch(connection: EngineConnection) -> None:
    while connection.process.exit_code() is None:  # noqa: ASYNC110  (the reader may hold the descriptor that would tell)
        await anyio.sleep(WATCH_S)
