"""Where a sleeping engine's memory goes: weights to the host and back, and freed memory to the system.

A move either succeeds for every weight or changes none.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from asyncllm.errors import InsufficientMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch import nn

__all__ = ["check_room", "give_back_memory", "move_to_device", "move_to_host", "telling_of_memory", "weight_bytes"]


def check_room(what: str, needed_bytes: int, free_bytes: int, phase: str, remedy: str) -> None:
    """Return if ``needed_bytes`` are free.

    :raises InsufficientMemoryError: they are not; tells ``remedy``.
    """
    if needed_bytes > free_bytes:
        raise InsufficientMemoryError(
            f"{what} need {needed_bytes / 2**20:.1f} MiB, but there is room for {free_bytes / 2**20:.1f} MiB; {remedy}",
            phase=phase,
            needed_bytes=needed_bytes,
            available_bytes=free_bytes,
        )


@contextmanager
def telling_of_memory(phase: str, what: str, remedy: str) -> Generator[None]:
    """Make a typed error of memory that host or device refuse to ``what``.

    :raises InsufficientMemoryError: they did; tells ``remedy``.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        found = str(error).partition("\n")[0] or "the system refuses it"
        raise InsufficientMemoryError(f"there is no memory for {what} ({found}); {remedy}", phase=phase) from error


def weight_bytes(model: nn.Module) -> int:
    """Return the memory of all parameters and buffers; tied ones count once."""
    return sum(tensor.numel() * tensor.itemsize for tensor in _tensors(model))


def move_to_host(model: nn.Module, *, pinned: bool) -> None:
    """Move all parameters and buffers to host memory; ``pinned``: to pages that a device reads at full speed.

    :raises RuntimeError: the host lacks the memory; nothing was moved.
    """

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned).copy_(tensor)

    _move(model, to_host)


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers to ``device``.

    :raises RuntimeError: the device lacks the memory; nothing was moved.
    """
    _move(model, lambda tensor: torch.empty_like(tensor, device=device).copy_(tensor))


def give_back_memory() -> None:
    """Return freed host memory to the system: the C library keeps small pieces and the space between them."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)


def _move(model: nn.Module, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    moved = [(tensor, copy(tensor.detach())) for tensor in _tensors(model)]
    for tensor, copied in moved:
        tensor.data = copied


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield each parameter and buffer once."""
    yield from model.parameters()
    yield from model.buffers()
