"""The inputs of a step on the device: static tensors in one block of memory, filled by one copy per step.

The host writes them as numpy arrays into a *staging block* of the same layout. There are as many of those as steps
that can be on their way, used in turn, so that the host never writes what a copy is still reading. On a CPU there is
one, and it is the device's block itself.

    block      | field | field | …          every field begins at a multiple of 64 bytes

Invariant: the addresses never change, so a captured graph may read them.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say what from_numpy takes)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncllm.worker.device_runtime import DONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from asyncllm.attention.base import StepField
    from asyncllm.worker.device_runtime import DeviceRuntime, Event, Staging

__all__ = ["StepBuffers"]

ALIGNMENT = 64


class Stage:
    """One staging block: its fields, and the point after which it may be written again."""

    def __init__(self, block: Staging, fields: Sequence[StepField], offsets: Sequence[int]) -> None:
        self.block = block
        self.copied: Event = DONE
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: block.array[begin : begin + size_of(shape, dtype)].view(dtype).reshape(shape)
            for (name, shape, dtype), begin in zip(fields, offsets, strict=True)
        }


class StepBuffers:
    """The fields on the device (:attr:`device`), and the staging blocks in turn."""

    def __init__(self, runtime: DeviceRuntime, fields: Sequence[StepField]) -> None:
        offsets: list[int] = []
        num_bytes = 0
        for _, shape, dtype in fields:
            offsets.append(num_bytes)
            num_bytes += -(-size_of(shape, dtype) // ALIGNMENT) * ALIGNMENT
        self._runtime = runtime
        self._stages = [Stage(runtime.staging(num_bytes), fields, offsets) for _ in range(runtime.num_stages)]
        self._turn = 0
        self._block = runtime.device_block(self._stages[0].block)
        self.device: Mapping[str, torch.Tensor] = {
            name: self._block[begin : begin + size_of(shape, dtype)].view(torch_dtype(dtype)).view(shape)
            for (name, shape, dtype), begin in zip(fields, offsets, strict=True)
        }

    def begin(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return the arrays of the next staging block, with old content; waits only for its own last copy."""
        self._turn = (self._turn + 1) % len(self._stages)
        stage = self._stages[self._turn]
        stage.copied.synchronize()
        return stage.arrays

    def commit(self) -> None:
        """Queue the copy of what was written since :meth:`begin`."""
        stage = self._stages[self._turn]
        stage.copied = self._runtime.copy(stage.block, self._block)


def size_of(shape: tuple[int, ...], dtype: type[np.generic]) -> int:
    """Return the bytes of an array."""
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def torch_dtype(dtype: type[np.generic]) -> torch.dtype:
    """Return torch's name for a dtype of numpy."""
    return getattr(torch, np.dtype(dtype).name)
