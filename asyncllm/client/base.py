"""The border between front end and engine, as the front end sees it.

Sending is the same for every client and never blocks and never awaits: add, abort, finish, park, pin. How outputs
arrive differs: :class:`InprocClient` steps the engine, :class:`SyncMPClient` blocks, :class:`AsyncMPClient` awaits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.client.async_mp import AsyncMPClient
    from asyncllm.config import EngineConfig
    from asyncllm.wire.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo, PinPrefix

__all__ = ["EngineCoreClient", "ReportStartup", "SyncEngineCoreClient"]

ReportStartup = Callable[[str, float | None], None]
"""``report(phase, fraction)``: a phase of the start-up begins, or has come this far. Called by the starting thread."""


class EngineCoreClient(ABC):
    """The sending half: every method returns at once."""

    info: EngineInfo
    """What the engine found out while starting; set once it is ready."""

    @overload
    @staticmethod
    def make_client(config: EngineConfig, mode: Literal["async"]) -> AsyncMPClient: ...

    @overload
    @staticmethod
    def make_client(config: EngineConfig, mode: Literal["sync", "inproc"]) -> SyncEngineCoreClient: ...

    @staticmethod
    def make_client(
        config: EngineConfig, mode: Literal["async", "sync", "inproc"]
    ) -> AsyncMPClient | SyncEngineCoreClient:
        """Return a client, not started: an engine process (awaited or blocked on), or the engine in this process."""
        if mode == "async":
            from asyncllm.client.async_mp import AsyncMPClient

            return AsyncMPClient(config)
        if mode == "sync":
            from asyncllm.client.sync_mp import SyncMPClient

            return SyncMPClient(config)
        from asyncllm.client.inproc import InprocClient

        return InprocClient(config)

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Send ``request``; if this raises, the engine does not have it.

        :raises EngineDeadError: the engine is gone.
        :raises OverflowError: a number in it does not fit 64 bits.
        """

    @abstractmethod
    def abort_requests(self, request_ids: Sequence[int]) -> None:
        """Drop requests; their blocks are free after the step that is running. Never raises, never awaits.

        Ids the engine does not know (finished ones) are ignored. What cannot be sent now waits in a deque.
        """

    @abstractmethod
    def finish_requests(self, request_ids: Sequence[int]) -> None:
        """End requests softly: the engine answers each with a finished row. Never raises, never awaits."""

    @abstractmethod
    def park_requests(self, request_ids: Sequence[int], parked: bool) -> None:
        """Leave requests out of steps until called again with ``parked=False``. Never raises, never awaits."""

    @abstractmethod
    def pin_prefix(self, pin: PinPrefix) -> None:
        """Have the engine keep the blocks of a prefix; before the requests that name it. Never raises, never awaits."""

    @abstractmethod
    def unpin_prefix(self, pin_id: int) -> None:
        """Have the engine let go of a prefix; an unknown id is ignored. Never raises, never awaits."""


class SyncEngineCoreClient(EngineCoreClient):
    """A client for callers without an event loop. Not thread-safe: one thread at a time."""

    @abstractmethod
    def start(self, report: ReportStartup | None = None) -> EngineInfo:
        """Start the engine, block until it is ready, and return what it found out.

        ``report(phase, fraction)`` is called as the start-up proceeds. A failure leaves nothing behind.

        :raises EngineStartError: it did not become ready.
        :raises ModelError: the checkpoint cannot be used (typed errors of the engine come as themselves).
        """

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Return the next step's outputs; blocks while requests are in flight, else returns empty ones at once.

        :raises EngineDeadError: the engine is gone.
        """

    @abstractmethod
    def poll_output(self) -> EngineCoreOutputs | None:
        """Return outputs that have arrived, ``None`` without any; never waits, and no step is run for it.

        :raises EngineDeadError: the engine is gone.
        """

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Call ``EngineCore.<method>(*args)`` in the engine between two steps and return its value.

        Outputs that arrive meanwhile are kept for :meth:`get_output`.

        :raises UtilityError: it failed there (typed errors of this package come as themselves).
        :raises EngineDeadError: the engine is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """End the engine and leave nothing behind. Idempotent; never raises."""
