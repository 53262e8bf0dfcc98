"""What the two clients of an engine process have in common: its life's bookkeeping and the sending half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from asyncllm.client.base import EngineCoreClient
from asyncllm.errors import EngineDeadError
from asyncllm.wire.messages import (
    AbortRequests,
    EngineCoreRequest,
    FinishRequests,
    ParkRequests,
    PinPrefix,
    UnpinPrefixes,
)

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sequence

    from asyncllm.client.connection import EngineConnection
    from asyncllm.config import EngineConfig

__all__ = ["WATCH_S", "MPClient"]

WATCH_S = 0.002
"""Between two looks at a process that is about to end, or at a socket whose peer has died; not used in normal work."""


class MPClient(EngineCoreClient):
    """An engine in a process of its own. A subclass starts it, waits for what it sends, and ends it.

    A client that is dropped, or alive when the interpreter exits, ends its engine process and leaves nothing behind.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._connection: EngineConnection | None = None
        self._finalizer: weakref.finalize[..., Self] | None = None
        self._is_ready = False

    @property
    def engine_pid(self) -> int | None:
        """Return the process id of the engine, ``None`` if it was not started."""
        return self._connection.process.pid if self._connection is not None else None

    def add_request(self, request: EngineCoreRequest) -> None:  # noqa: D102
        connection = self._started()
        connection.raise_if_gone()
        connection.send(request)

    def abort_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        if request_ids and self._connection is not None:
            self._connection.send(AbortRequests(list(request_ids)))

    def finish_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        if request_ids and self._connection is not None:
            self._connection.send(FinishRequests(list(request_ids)))

    def park_requests(self, request_ids: Sequence[int], parked: bool) -> None:  # noqa: D102
        if request_ids and self._connection is not None:
            self._connection.send(ParkRequests(list(request_ids), parked))

    def pin_prefix(self, pin: PinPrefix) -> None:  # noqa: D102
        if self._connection is not None:
            self._connection.send(pin)

    def unpin_prefix(self, pin_id: int) -> None:  # noqa: D102
        if self._connection is not None:
            self._connection.send(UnpinPrefixes([pin_id]))

    def _started(self) -> EngineConnection:
        if self._connection is None or not self._is_ready:
            raise EngineDeadError("the engine was not started")
        return self._connection
