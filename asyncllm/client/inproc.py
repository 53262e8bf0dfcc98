"""The engine in the caller's own process: no border, no thread. For tests, debuggers and ``LLM(in_process=True)``."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asyncllm.client.base import ReportStartup, SyncEngineCoreClient
from asyncllm.errors import AsyncLLMError, EngineDeadError, EngineStartError, UsageError, UtilityError, describe_error
from asyncllm.wire.codec import encode
from asyncllm.wire.messages import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishRequests,
    ParkRequests,
    PinPrefix,
    UnpinPrefixes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncllm.config import EngineConfig
    from asyncllm.core.engine_core import EngineCore

__all__ = ["InprocClient"]

T = TypeVar("T")


class InprocClient(SyncEngineCoreClient):
    """Steps the engine itself: :meth:`get_output` runs it. Torch is imported here, in the caller's process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._core: EngineCore | None = None
        self._death: Exception | None = None
        self._kept: deque[EngineCoreOutputs] = deque()

    def start(self, report: ReportStartup | None = None) -> EngineInfo:  # noqa: D102
        from asyncllm.core.engine_core import EngineCore

        if self._core is not None:
            raise UsageError("this client was started already")
        try:
            self._core = EngineCore(self._config, report or _do_nothing)
        except AsyncLLMError:
            raise
        except Exception as error:
            raise EngineStartError(f"{type(error).__name__}: {error}") from error
        self.info = self._core.info
        return self.info

    def close(self) -> None:  # noqa: D102
        if self._core is not None and self._death is None:
            self._death = UsageError("the engine was closed")
            self._kept.clear()
            self._core.shutdown()

    # ---------------------------------------------------------------------------------------------------------- sending
    def add_request(self, request: EngineCoreRequest) -> None:  # noqa: D102
        encode(request)  # refuses the numbers that no engine process would get
        self._alive().apply(request)

    def abort_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        if self._core is not None:
            self._core.apply(AbortRequests(list(request_ids)))

    def finish_requests(self, request_ids: Sequence[int]) -> None:  # noqa: D102
        if self._core is not None:
            self._core.apply(FinishRequests(list(request_ids)))

    def park_requests(self, request_ids: Sequence[int], parked: bool) -> None:  # noqa: D102
        if self._core is not None:
            self._core.apply(ParkRequests(list(request_ids), parked))

    def pin_prefix(self, pin: PinPrefix) -> None:  # noqa: D102
        if self._core is not None:
            self._core.apply(pin)

    def unpin_prefix(self, pin_id: int) -> None:  # noqa: D102
        if self._core is not None:
            self._core.apply(UnpinPrefixes([pin_id]))

    # -------------------------------------------------------------------------------------------------------- receiving
    def get_output(self) -> EngineCoreOutputs:
        """Run steps until one has outputs and return them; empty ones if there is nothing to compute.

        :raises EngineDeadError: a step failed, now or before.
        """
        core = self._alive()
        if self._kept:
            return self._kept.popleft()
        while (outputs := self._guard(core.step)) is not None or core.wait_for_grammar():
            if outputs is not None and (outputs.request_ids or outputs.finished or outputs.prompt_logprobs):
                return outputs
        return EngineCoreOutputs()

    def poll_output(self) -> EngineCoreOutputs | None:  # noqa: D102
        core = self._alive()
        if self._kept:
            return self._kept.popleft()
        return self._guard(core.step) if core.scheduler.asleep else None  # asleep, it only answers

    def call_utility(self, method: str, *args: Any) -> Any:  # noqa: D102
        core = self._alive()
        try:
            value = core.call(method, args)
        except AsyncLLMError:
            raise
        except Exception as error:
            raise AsyncLLMError.from_info(describe_error(error)) from error
        if not isinstance(value, Future):
            return value
        return self._step_until(core, cast("Future[Any]", value), method)

    def _step_until(self, core: EngineCore, answer: Future[Any], method: str) -> Any:
        """Run the engine until a deferred answer is there; outputs are kept for :meth:`get_output`."""
        while not answer.done():
            outputs = self._guard(core.step)
            if outputs is None and core.wait_for_grammar():
                continue
            if outputs is None:
                raise UtilityError(f"{method!r} waits for requests that are paused, parked or asleep", method=method)
            self._kept.append(outputs)
        return answer.result()

    def _guard(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception as error:
            self._death = error
            if self._core is not None:
                self._core.shutdown()
            raise self._death_error(error) from error

    def _alive(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError("the engine was not started")
        if self._death is not None:
            raise self._death_error(self._death) from self._death
        return self._core

    @staticmethod
    def _death_error(cause: Exception) -> EngineDeadError:
        return EngineDeadError(f"the engine has ended: {type(cause).__name__}: {cause}")


def _do_nothing(phase: str, fraction: float | None) -> None:
    pass
