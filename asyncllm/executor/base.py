"""The border between engine core and devices: the core never knows how many workers there are, or where.

An executor is created, used and shut down by the engine's busy-loop thread. No torch here: a worker's module is
imported by its qualified name, in the worker's process.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from asyncllm import platforms
from asyncllm.config import AUTO
from asyncllm.errors import ConfigError

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.wire.step import ModelRunnerOutput, SchedulerOutput

__all__ = ["Executor", "ExecutorInfo", "PendingStep", "ReportProgress", "resolve_class"]

ReportProgress = Callable[[str, float | None], None]
"""``report(phase, fraction)``: a phase of the start-up begins, or has come this far."""

NAME_TO_EXECUTOR = {"uniproc": "asyncllm.executor.uniproc.UniProcExecutor"}


@dataclass(frozen=True, kw_only=True)
class ExecutorInfo:
    """What the workers found out while starting; the scheduler and the front end are sized by it."""

    max_model_len: int
    """Longest request in tokens: the option or the model's own length, lowered to what the KV blocks hold."""
    vocab_size: int
    """Ids that can be sampled (padding rows of the head excluded)."""
    eos_token_ids: tuple[int, ...]
    block_size: int
    """Tokens per KV block: the option, or what the attention backend wants."""
    num_blocks: int
    """Usable KV blocks, with ids 1 … num_blocks; block 0 is the null block that padding rows point at."""
    kv_cache_bytes: int
    device: str
    dtype: str
    attention_backend: str
    kernels: str = ""
    """Which operators the model runs on, with instruction set and threads."""
    kv_cache_dtype: str = ""
    """How keys and values are stored."""
    device_reason: str = ""
    """Why this device was taken, or which one it is."""
    other_backends: Mapping[str, str] = field(default_factory=dict[str, str])
    """The attention backends that were not taken, and why."""
    graph_sizes: Sequence[int] = ()
    """Numbers of rows whose decode steps are replayed as CUDA graphs."""
    memory_plan: Mapping[str, int] = field(default_factory=dict[str, int])
    """What the memory holds, in bytes, by words for a reader."""
    phase_to_seconds: Mapping[str, float] = field(default_factory=dict[str, float])


class PendingStep(Protocol):
    """A step that was launched; its tokens may still be on their way from the device."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output.

        :raises Exception: whatever the worker raised.
        """
        ...


class Executor(ABC):
    """Runs workers and hands them steps."""

    def __init__(self, config: EngineConfig, report: ReportProgress) -> None:
        self.config = config
        self.report = report

    @staticmethod
    def get_class(config: EngineConfig) -> type[Executor]:
        """Return the class that ``config.parallel.executor`` names.

        :raises ConfigError: there is no such class, or it is not an :class:`Executor`.
        """
        name = config.parallel.executor
        cls = resolve_class(NAME_TO_EXECUTOR.get(name, name), parameter="executor")
        if not issubclass(cls, Executor):
            raise ConfigError(f"executor {name!r} is not an Executor", parameter="executor", value=name)
        return cls

    def overlaps_steps(self) -> bool:
        """Return whether a step is to be launched before the one before it has ended; also before :meth:`start`."""
        option = self.config.scheduler.async_scheduling
        return platforms.current(self.config).is_asynchronous if option == AUTO else option

    @abstractmethod
    def start(self) -> ExecutorInfo:
        """Init devices, load the model, size and allocate the KV blocks, warm up. Blocks until steps can run.

        :raises ModelError: the checkpoint cannot be used.
        :raises InsufficientMemoryError: one request of ``max_model_len`` does not fit.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Launch one step and return without waiting for its result where the device allows that.

        Steps run in the order of their launch; with :meth:`overlaps_steps` the next may come before this one has ended.
        """

    @abstractmethod
    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``method`` on every worker and return their values in rank order.

        :raises AttributeError: the workers have no such method.
        :raises Exception: whatever a worker raised.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and free what they hold. Idempotent; also after a failed :meth:`start`."""

    @abstractmethod
    def check_health(self) -> None:
        """Return if every worker lives.

        :raises EngineDeadError: one does not.
        """


def resolve_class(qualified_name: str, *, parameter: str) -> type[Any]:
    """Import and return the class ``package.module.Class``.

    :raises ConfigError: the module or the class is not there; ``parameter`` is the option that named it.
    """
    module_name, _, class_name = qualified_name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{parameter} names {qualified_name!r}, which cannot be imported: {error}",
            parameter=parameter,
            value=qualified_name,
        ) from error
    if not isinstance(found, type):
        raise ConfigError(f"{parameter} {qualified_name!r} is not a class", parameter=parameter, value=qualified_name)
    return cast("type[Any]", found)
