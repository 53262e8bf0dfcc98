"""Token and position embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from asyncllm.layers.linear import LinearMethod, Matrix, parameter

__all__ = ["Embedding", "LearnedPositions"]


class Embedding(Matrix):
    """A table of rows by id, kept by the same method as the linear layers, so that a tied head can share it."""

    def __init__(
        self,
        num_rows: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__(size, (num_rows,), dtype=dtype, device=device, method=method)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids`` [T], as a new tensor [T, size] that the caller may change."""
        return self.method.gather(self, ids)


class LearnedPositions(nn.Module):
    """One learned row per position; the first ``offset`` rows of the table stand for no position."""

    def __init__(self, num_positions: int, size: int, offset: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(num_positions + offset, size, dtype=dtype, device=device)
        self.offset = offset

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the positions ``ids`` [T], [T, size]."""
        return F.embedding(ids + self.offset, self.weight)

    def destinations(self, name: str) -> dict[str, torch.Tensor]:
        """Return which parameter each checkpoint tensor fills."""
        return {f"{name}.weight": self.weight}
