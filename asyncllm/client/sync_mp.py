"""The client of callers without an event loop: the same connection as :class:`AsyncMPClient`, waited on by blocking."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from asyncllm.client.base import SyncEngineCoreClient
from asyncllm.client.connection import EngineConnection, PendingCall
from asyncllm.client.launcher import TERMINATE_TIMEOUT_S
from asyncllm.client.mp import WATCH_S, MPClient
from asyncllm.errors import UsageError
from asyncllm.wire.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.client.base import ReportStartup
    from asyncllm.config import EngineConfig
    from asyncllm.wire.messages import EngineCoreRequest, EngineInfo

__all__ = ["SyncMPClient"]

MAX_WAIT_S = 3600.0
"""At a stretch: the system's timers end at some weeks."""


class SyncMPClient(MPClient, SyncEngineCoreClient):
    """For one thread at a time."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._in_flight: set[int] = set()
        self._kept: deque[EngineCoreOutputs] = deque()

    # ---------------------------------------------------------------------------------------------------- start and end
    def start(self, report: ReportStartup | None = None) -> EngineInfo:  # noqa: D102
        if self._connection is not None:
            raise UsageError("this client was started already")
        connection = self._connection = EngineConnection(self._config, "make a new LLM to go on")
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

    # ---------------------------------------------------------------------------------------------------------- sending
    def add_request(self, request: EngineCoreRequest) -> None:  # noqa: D102
        super().add_request(request)
        self._in_flight.add(request.request_id)

    def abort_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        self._in_flight.difference_update(request_ids)
        super().abort_requests(request_ids)

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

    def poll_output(self) -> EngineCoreOutputs | None:  # noqa: D102
        connection = self._started()
        if self._kept:
            return self._kept.popleft()
        outputs = connection.next_outputs()
        if outputs is None:
            connection.raise_if_dead()
            return None
        return self._arrived(outputs)

    def _arrived(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        self._in_flight.difference_update([row.request_id for row in outputs.finished])
        return outputs

    def _next_outputs(self, connection: EngineConnection, call: PendingCall | None = None) -> EngineCoreOutputs | None:
        """Return outputs if there are any; else wait until something happens (``call`` is answered); return ``None``.

        :raises EngineDeadError: the engine has ended, and all was read.
        """
        is_ending = connection.is_ending()
        drained = is_ending and connection.has_drained()
        outputs = connection.next_outputs()
        if outputs is not None:
            return self._arrived(outputs)
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


def _do_nothing() -> None:
    pass
