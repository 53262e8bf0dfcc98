"""Linear layers, and the seam where a packed or quantized form of their weights drops in.

Invariant: a layer made of several projections that read the same input (query, key and value; gate and up) is one
matrix, whose rows are the projections' rows one after the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

__all__ = ["Linear", "LinearMethod", "TorchLinearMethod", "use_linear_method"]


class LinearMethod(Protocol):
    """How linear layers keep their weights once loaded, and multiply by them."""

    def prepare(self, layer: Linear) -> None:
        """Bring the loaded weight into the form that :meth:`apply` reads, :attr:`Linear.prepared`; called once.

        A method that no longer needs ``layer.weight`` drops it by :meth:`Linear.drop_weight`.
        """
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        ...


class TorchLinearMethod:
    """The weight as it was loaded, multiplied by torch."""

    def prepare(self, layer: Linear) -> None:
        """Keep the weight as it is."""

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        return F.linear(x, layer.weight, layer.bias)


class Linear(nn.Module):
    """``x @ weight.T + bias``, for one projection or for several that share their input.

    ``weight`` [sum(out_sizes), in_size], ``bias`` [sum(out_sizes)] or ``None``.
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_size: int, out_sizes: int | tuple[int, ...], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.in_size = in_size
        self.out_sizes = (out_sizes,) if isinstance(out_sizes, int) else out_sizes
        out_size = sum(self.out_sizes)
        self.weight = parameter(out_size, in_size, dtype=dtype, device=device)
        self.bias = parameter(out_size, dtype=dtype, device=device) if bias else None
        self.method: LinearMethod = TorchLinearMethod()
        self.prepared: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projections of ``x`` [T, in], side by side: [T, sum(out_sizes)]."""
        return self.method.apply(self, x)

    def drop_weight(self) -> None:
        """Let go of the loaded weight; whoever else holds it, such as a tied embedding, keeps it."""
        del self.weight

    def destinations(self, *names: str) -> dict[str, torch.Tensor]:
        """Return which part of the parameters each checkpoint tensor fills; ``names`` in the order of ``out_sizes``."""
        assert len(names) == len(self.out_sizes)
        sizes = list(self.out_sizes)
        found = dict(zip([f"{name}.weight" for name in names], torch.split(self.weight, sizes), strict=True))
        if self.bias is not None:
            found.update(zip([f"{name}.bias" for name in names], torch.split(self.bias, sizes), strict=True))
        return found


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def use_linear_method(model: nn.Module, method: LinearMethod) -> None:
    """Make every linear layer of ``model`` keep and apply its weights by ``method``; call it after loading."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.method = method
            method.prepare(module)
