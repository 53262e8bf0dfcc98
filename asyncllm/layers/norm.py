"""RMSNorm and LayerNorm over the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from asyncllm.kernels.fused import fused_kernels
from asyncllm.layers.linear import parameter

if TYPE_CHECKING:
    from asyncllm.layers.linear import Destination
    from asyncllm.loader import QuantizedTensor

__all__ = ["LayerNorm", "OffsetRMSNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019), in float32, rounded before the weight is applied."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)
        self._kernels = fused_kernels(device)

    def forward(self, hidden: torch.Tensor, update: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``hidden`` [T, size] normalised, as a new tensor, after ``update`` was added to it in place."""
        if update is None:
            return self._kernels.rms_norm(hidden, self.weight, self.eps)
        return self._kernels.add_rms_norm(hidden, update, self.weight, self.eps)

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return which parameter each checkpoint tensor fills."""
        return {f"{name}.weight": self.weight}


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose weight a checkpoint holds as the distance from one (Gemma), all of it in float32.

    ``weight`` is float32 with the one added, whatever the model's dtype.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(size, eps, dtype=torch.float32, device=device)

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return what takes each checkpoint tensor."""
        return {f"{name}.weight": _AddOne(self.weight)}


class _AddOne:
    """Puts a tensor and one into ``target``."""

    def __init__(self, target: torch.Tensor) -> None:
        self.shape = tuple(target.shape)
        self._target = target

    def take(self, tensor: torch.Tensor | QuantizedTensor) -> None:
        """Add in float32, as transformers does in each forward pass."""
        values = tensor if isinstance(tensor, torch.Tensor) else tensor.dequantize(torch.float32)
        self._target.copy_(values).add_(1.0)


class LayerNorm(nn.Module):
    """Layer normalisation (Ba et al. 2016); ``affine=False``: with neither weight nor bias."""

    def __init__(
        self, size: int, *, affine: bool = True, eps: float = 1e-5, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device) if affine else None
        self.bias = parameter(size, dtype=dtype, device=device) if affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, size] normalised, as a new tensor."""
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def destinations(self, name: str) -> dict[str, Destination]:
        """Return which parameter each checkpoint tensor fills."""
        if self.weight is None or self.bias is None:
            return {}
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}
