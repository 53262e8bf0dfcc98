"""The client of callers without an event loop: the same connection as :class:`AsyncMPClient`, waited on by blocking."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from asyncllm.client.base import ReportStartup, SyncEngineCoreClient
from asyncllm.client.connection import EngineConnection, PendingCall
from asyncllm.client.launcher import TERMINATE_TIMEOUT_S
from asyncllm.errors import EngineDeadError, UsageError
from asyncllm.wire.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishRequests,
    ParkRequests,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.config import EngineConfig

__all__ = ["SyncMPClient"]

MAX_WAIT_S = 3600.0
"""At a stretch: the system's timers end at some weeks."""
WATCH_S = 0.002
"""Between two looks at a process that is about to end, or at a socket whose peer has died; not used in normal work."""


class SyncMPClient(SyncEngineCoreClient):
    """An engine in a process of its own, for one thread at a time.

    A client that is dropped, or alive when the interpreter exits, ends its engine process and leaves nothing behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._connection: EngineConnection | None = None
        self._finalizer: weakref.finalize[..., Self] | None = None
        self._is_ready = False
        self._in_flight: set[int] = set()
        self._kept: deque[EngineCoreOutputs] = deque()

    # ---------------------------------------------------------------------------------------------------- start and end
    def start(self, report: ReportStartup | None = None) -> EngineInfo:  # noqa: D102
        if self._connection is not None:
            raise UsageError("this client was started already")
        connection = self._connection = EngineConnection(self._config)
        finalizer = self._finalizer = weakref.finalize(self, connection.close, grace_s=TERMINATE_TIMEOUT_S)
        try:
            self.info = self._wait_until_ready(connection, report)
        except BaseException:
            self._connection = None
            connection.close(grace_s=0)
            finalizer.detach()
            raise
        self._is_ready = True
        return self.info

    def _wait_until_ready(self, connection: EngineConnection, report: ReportStartup | None) -> EngineInfo:
        deadline = time.monotonic() + connection.startup_timeout_s
        while (info := connection.next_startup_step(report)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise connection.startup_timed_out()
            if connection.process.has_ended():
                time.sleep(WATCH_S)
            else:
                connection.process.readiness.wait(min(left_s, MAX_WAIT_S))
        return info

    def close(self) -> None:  # noqa: D102
        connection = self._connection
        if connection is None:
            return
        try:
            connection.request_shutdown()
            deadline = time.monotonic() + connection.shutdown_timeout_s
            while connection.process.exit_code() is None and time.monotonic() < deadline:
                time.sleep(WATCH_S)
        finally:
            connection.close(grace_s=TERMINATE_TIMEOUT_S)
            self._in_flight.clear()
            self._kept.clear()
            if self._finalizer is not None:
                self._finalizer.detach()

    @property
    def engine_pid(self) -> int | None:
        """Return the process id of the engine, ``None`` if it was not started."""
        return self._connection.process.pid if self._connection is not None else None

    # ---------------------------------------------------------------------------------------------------------- sending
    def add_request(self, request: EngineCoreRequest) -> None:  # noqa: D102
        connection = self._started()
        connection.raise_if_gone()
        connection.send(request)
        self._in_flight.add(request.request_id)

    def abort_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        self._in_flight.difference_update(request_ids)
        if request_ids and self._connection is not None:
            self._connection.send(AbortRequests(list(request_ids)))

    def finish_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        if request_ids and self._connection is not None:
            self._connection.send(FinishRequests(list(request_ids)))

    def park_requests(self, request_ids: Sequence[int], parked: bool) -> None:  # noqa: D102
        if request_ids and self._connection is not None:
            self._connection.send(ParkRequests(list(request_ids), parked))

    # -------------------------------------------------------------------------------------------------------- receiving
    def get_output(self) -> EngineCoreOutputs:
        """Return the next step's outputs; empty ones at once if no request is in flight.

        :raises EngineDeadError: the engine ended; all that it sent was returned before.
        """
        connection = self._started()
        if self._kept:
            return self._kept.popleft()
        while self._in_flight:
            outputs = self._next_outputs(connection)
            if outputs is not None:
                return outputs
        connection.raise_if_dead()
        return EngineCoreOutputs()

    def _next_outputs(self, connection: EngineConnection, call: PendingCall | None = None) -> EngineCoreOutputs | None:
        """Return outputs if there are any; else wait until something happens (``call`` is answered); return ``None``.

        :raises EngineDeadError: the engine has ended, and all was read.
        """
        is_ending = connection.is_ending()
        drained = is_ending and connection.has_drained()
        outputs = connection.next_outputs()
        if outputs is not None:
            self._in_flight.difference_update([row.request_id for row in outputs.finished])
            return outputs
        if call is not None and call.done:
            return None
        connection.raise_if_dead()
        if drained:
            connection.bury()
            raise connection.death_error()
        if is_ending:
            time.sleep(WATCH_S)
        else:
            connection.process.readiness.wait()
        return None

    def call_utility(self, method: str, *args: Any) -> Any:  # noqa: D102
        connection = self._started()
        call = connection.call(method, args, _do_nothing)
        try:
            while not call.done:
                outputs = self._next_outputs(connection, call)
                if outputs is not None:
                    self._kept.append(outputs)
        finally:
            connection.drop(call)
        return call.result()

    def _started(self) -> EngineConnection:
        if self._connection is None or not self._is_ready:
            raise EngineDeadError("the engine was not started")
        return self._connection


def _do_nothing() -> None:
    pass
