"""How many KV blocks to allocate: pure arithmetic on what is free, what is wanted and what could ever be used.

A host's memory belongs to others as well: blocks take a share of what is free. A device's memory is the engine's up to
``gpu_memory_utilization``: blocks take what :class:`MemoryProfile` leaves of it.

    |<------------------ total_bytes * gpu_memory_utilization ----------------->|
    | used (weights) | largest step | CUDA graphs |         KV blocks           | … |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from asyncllm.errors import InsufficientMemoryError

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig

__all__ = ["DeviceMemory", "KVCachePlan", "MemoryProfile", "plan_kv_cache"]


class DeviceMemory(Protocol):
    """What the worker asks of a device with memory of its own. All numbers are bytes."""

    def memory_info(self) -> tuple[int, int]:
        """Return what is free on the device, whoever uses the rest, and its whole memory."""
        ...

    def allocated_bytes(self) -> int:
        """Return what this process's living tensors take."""
        ...

    def peak_allocated_bytes(self) -> int:
        """Return the most that they took since :meth:`reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Begin to look for a new peak."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        ...

    def empty_cache(self) -> None:
        """Give freed memory that the allocator keeps back to the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """What a device's memory has to hold besides KV blocks, in bytes, as measured by a run of the largest step."""

    total_bytes: int
    """The whole memory of the device."""
    free_bytes: int
    """Free while nothing but the weights is there."""
    used_bytes: int
    """What the engine has taken so far: weights, and whatever libraries keep."""
    step_bytes: int
    """What the largest step takes besides, the persistent batch and the backend's scratch memory included."""
    graph_bytes: int = 0
    """What captured CUDA graphs will take."""

    def room_bytes(self, utilization: float) -> int:
        """Return what is left for KV blocks; negative where the rest alone is too much."""
        own_bytes = int(self.total_bytes * utilization) - self.used_bytes
        return min(own_bytes, self.free_bytes) - self.step_bytes - self.graph_bytes

    def parts(self) -> dict[str, int]:
        """Return the numbers by words for a reader."""
        return {
            "whole device": self.total_bytes,
            "weights": self.used_bytes,
            "the largest step": self.step_bytes,
            "CUDA graphs": self.graph_bytes,
        }

    def describe(self, utilization: float) -> str:
        """Return the sum in words, for an error."""
        _, *parts = self.parts().items()
        taken = ", ".join(f"{name} {_mib(num_bytes)}" for name, num_bytes in parts if num_bytes)
        return (
            f"of the device's {_mib(self.total_bytes)}, {_mib(self.free_bytes)} free, "
            f"gpu_memory_utilization={utilization} allows {_mib(self.total_bytes * utilization)}: {taken}"
        )


@dataclass(frozen=True, kw_only=True)
class KVCachePlan:
    """Usable blocks (the null block comes on top) and the longest request that the engine takes."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True)
class _Room:
    """The memory that there is for KV blocks, and how the option is called that gives them more."""

    free_bytes: int
    option: str
    explanation: str = ""


def plan_kv_cache(
    config: EngineConfig,
    *,
    model_max_len: int,
    bytes_per_block: int,
    free_bytes: int = 0,
    cap_bytes: int | None = None,
    profile: MemoryProfile | None = None,
) -> KVCachePlan:
    """Return the blocks to allocate and the true ``max_model_len``.

    ``cache.num_blocks`` and ``cache.kv_cache_bytes`` are taken as they are. Otherwise the blocks are what ``profile``
    leaves of a device, or a share of ``free_bytes`` of a host and no more than ``cap_bytes``; and no more than
    ``max_num_seqs`` requests of full length could fill. A ``max_model_len`` that was not asked for is lowered to what
    the blocks hold. One that was asked for must fit, unless ``num_blocks`` was given too: then the caller chose the
    pool, and the scheduler ends what outgrows it.

    :raises InsufficientMemoryError: the blocks do not fit the memory, or one request of the asked length does not fit
        the blocks.
    """
    cache, block_size = config.cache, config.cache.tokens_per_block
    wanted_len = config.model.max_model_len or model_max_len
    blocks_per_request = -(-wanted_len // block_size)
    if profile is None:
        room = _Room(free_bytes, "memory_fraction")
        budget = int(free_bytes * cache.memory_fraction)
    else:
        utilization = cache.gpu_memory_utilization
        budget = max(profile.room_bytes(utilization), 0)
        room = _Room(budget, "gpu_memory_utilization", f" ({profile.describe(utilization)})")
    if cache.num_blocks is not None:
        num_blocks = cache.num_blocks
        most = max(room.free_bytes // bytes_per_block - 1, 0)
        _check_fits("num_blocks", num_blocks, most, (num_blocks + 1) * bytes_per_block, room, most * block_size)
    elif cache.kv_cache_bytes is not None:
        num_blocks = cache.kv_cache_bytes // bytes_per_block - 1
        most = max(room.free_bytes // bytes_per_block - 1, 0)
        _check_fits(
            "kv_cache_bytes", cache.kv_cache_bytes, room.free_bytes, cache.kv_cache_bytes, room, most * block_size
        )
    else:
        budget = budget if cap_bytes is None else min(budget, cap_bytes)
        num_blocks = min(budget // bytes_per_block - 1, config.scheduler.max_num_seqs * blocks_per_request)
    num_blocks = max(num_blocks, 0)
    if num_blocks >= blocks_per_request:
        return KVCachePlan(num_blocks=num_blocks, max_model_len=wanted_len)
    if num_blocks and config.model.max_model_len is None:
        return KVCachePlan(num_blocks=num_blocks, max_model_len=num_blocks * block_size)
    if num_blocks and cache.num_blocks is not None:
        return KVCachePlan(num_blocks=num_blocks, max_model_len=wanted_len)
    needed_bytes = (blocks_per_request + 1) * bytes_per_block
    if cache.kv_cache_bytes is not None:
        raise _insufficient(
            f"kv_cache_bytes={cache.kv_cache_bytes} holds {num_blocks} KV blocks ({bytes_per_block} bytes each, one "
            f"more is never used); one request of max_model_len={wanted_len} needs {blocks_per_request}",
            f"Raise kv_cache_bytes to at least {needed_bytes}" + (", or lower max_model_len" if num_blocks else ""),
            needed_bytes=needed_bytes,
            available_bytes=cache.kv_cache_bytes,
            max_model_len_fit=num_blocks * block_size,
        )
    available_bytes = (num_blocks + 1) * bytes_per_block if num_blocks else room.free_bytes
    fewer = ", max_num_batched_tokens or max_num_seqs" if room.explanation else ""
    raise _insufficient(
        f"one request of max_model_len={wanted_len} needs {blocks_per_request} KV blocks ({_mib(needed_bytes)}), but "
        f"there is room for {_mib(available_bytes)}{room.explanation}",
        f"Lower max_model_len{fewer}, or give the KV cache more memory with kv_cache_bytes or {room.option}",
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        max_model_len_fit=num_blocks * block_size,
    )


def _check_fits(option: str, value: int, most: int, needed_bytes: int, room: _Room, max_model_len_fit: int) -> None:
    """Refuse an ``option`` whose blocks take more memory than there is; ``most`` is what it could be."""
    if needed_bytes > room.free_bytes:
        raise _insufficient(
            f"{option}={value} ({_mib(needed_bytes)}), but there is room for {_mib(room.free_bytes)}{room.explanation}",
            f"Lower {option} to at most {most}",
            needed_bytes=needed_bytes,
            available_bytes=room.free_bytes,
            max_model_len_fit=max_model_len_fit,
        )


def _insufficient(
    what: str, remedy: str, *, needed_bytes: int, available_bytes: int, max_model_len_fit: int
) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"{what}; the largest max_model_len that would fit is {max_model_len_fit}. {remedy}.",
        phase="determine_num_blocks",
        max_model_len_fit=max_model_len_fit,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
    )


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
