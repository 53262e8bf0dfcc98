"""RMSNorm and LayerNorm over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from asyncllm.layers.linear import parameter

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019), in float32, rounded before the weight is applied."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.shape = (size,)
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, size] normalised, as a new tensor."""
        if x.dtype == torch.float32:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)  # the same operations in one call
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def destinations(self, name: str) -> dict[str, torch.Tensor]:
        """Return which parameter each checkpoint tensor fills."""
        return {f"{name}.weight": self.weight}


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

    def destinations(self, name: str) -> dict[str, torch.Tensor]:
        """Return which parameter each checkpoint tensor fills."""
        if self.weight is None or self.bias is None:
            return {}
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}
