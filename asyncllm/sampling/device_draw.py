"""Draw on the device: the sampling parameters go there once while the rows stay the same, the numbers in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncllm.kernels.base import SAMPLING_DTYPE
from asyncllm.kernels.fused import fused_kernels

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncllm.kernels.base import DrawnTokens
    from asyncllm.kernels.fused import FusedKernels
    from asyncllm.sampling.upload import Upload

__all__ = ["DeviceDraw", "make_device_draw", "parameter_columns"]

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

WORDS = SAMPLING_DTYPE.itemsize // 4
_NOTHING = torch.empty(0)


class DeviceDraw:
    """Draws by ``kernels``; ``upload`` brings an array to the device, where it must stay as it is."""

    def __init__(self, kernels: FusedKernels, upload: Upload) -> None:
        self._kernels = kernels
        self._upload = upload
        self._parameters: npt.NDArray[np.void] | None = None
        self._columns: Columns = (_NOTHING, _NOTHING, _NOTHING, _NOTHING)

    def __call__(self, logits: torch.Tensor, parameters: npt.NDArray[np.void], numbers: torch.Tensor) -> DrawnTokens:
        """Return a token of each row of ``logits`` [R, V].

        ``parameters`` [R] of :data:`SAMPLING_DTYPE`, uploaded when they are another object than last time; ``numbers``
        [R] (float64), uniform, on the device.
        """
        if parameters is not self._parameters:
            words = np.ascontiguousarray(parameters).view(np.int32).reshape(-1, WORDS)
            self._columns = parameter_columns(self._upload(words))
            self._parameters = parameters
        return self._kernels.draw_tokens(logits, *self._columns, numbers)


def make_device_draw(device: torch.device, upload: Upload) -> DeviceDraw | None:
    """Return what draws on ``device``; ``None`` where its kernels leave drawing to torch.

    Raises as :func:`fused_kernels`.
    """
    kernels = fused_kernels(device)
    return DeviceDraw(kernels, upload) if kernels.draws else None


def parameter_columns(words: torch.Tensor) -> Columns:
    """Return temperature, top-k, top-p and min-p, as views [R] of :data:`SAMPLING_DTYPE` rows ``words`` [R, 8] (int32).

    So a step's parameters are one copy, and may lie in memory that a captured graph reads.
    """
    fields: Any = SAMPLING_DTYPE.fields  # name: (dtype, offset in bytes)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return words[:, fields[name][1] // 4].view(dtype)

    return (
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
    )
