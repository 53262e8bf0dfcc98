"""What the worker must know of a machine before and while it owns one of its devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from asyncllm.config import DeviceConfig

__all__ = ["Platform"]


class Platform(ABC):
    """One device. Every question is answered from the machine when it is asked."""

    name: ClassVar[str]
    """The device type as torch spells it."""
    worker_cls: ClassVar[str]
    """Qualified name of the worker class, imported in the worker's process only."""
    attention_backends: ClassVar[tuple[str, ...]]
    """Names of the attention backends to try for ``auto``, best first."""
    has_own_memory: ClassVar[bool] = False
    """Whether weights and KV blocks lie in memory of the device, not the host's."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        """Why it was chosen, where somebody had to choose."""

    @property
    def device(self) -> str:
        """The device as torch spells it, with its index where there may be several."""
        return self.name

    is_asynchronous: ClassVar[bool] = True
    """Whether a launched step computes by itself while the host goes on."""

    @abstractmethod
    def default_dtype(self, stored_as: str | None) -> str:
        """Return what ``dtype="auto"`` means here for a checkpoint whose weights are ``stored_as`` that dtype."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the host memory that this process can still take for itself, in bytes."""

    @abstractmethod
    def kv_cache_cap_bytes(self) -> int | None:
        """Return the most KV cache to take unasked, in bytes; ``None`` where the device is the engine's alone."""

    @abstractmethod
    def num_threads(self, config: DeviceConfig) -> int:
        """Return how many threads a worker computes with."""
