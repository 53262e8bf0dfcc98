"""Linear layers, and the seam where a packed or quantized form of their weights drops in.

Invariant: a layer made of several projections that read the same input (query, key and value; gate and up) is one
matrix, whose rows are the projections' rows one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.loader import QuantizedTensor

__all__ = ["Destination", "Linear", "LinearMethod", "Matrix", "Receiver", "TorchLinearMethod", "prepare_linear_layers"]


class Receiver(Protocol):
    """Takes one matrix of a checkpoint in the form in which it is stored there, and keeps it in a form of its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the matrix must have."""
        ...

    def take(self, tensor: torch.Tensor | QuantizedTensor) -> None:
        """Keep the values of ``tensor``, which is valid during the call only."""
        ...


Destination = torch.Tensor | Receiver
"""Where a tensor of a checkpoint goes: memory to copy it to, cast to its dtype, or what takes it as it is stored."""


class LinearMethod(Protocol):
    """How matrices keep their weights, from construction through loading to the products with them."""

    def create(self, matrix: Matrix) -> None:
        """Set up what the weight will be loaded into; called once, by the constructor."""
        ...

    def tie(self, matrix: Matrix, other: Matrix) -> None:
        """Let ``matrix`` share the weight of ``other``, which has the same shape and method; called before loading."""
        ...

    def destinations(self, matrix: Matrix) -> Sequence[Destination]:
        """Return where the weight of each projection goes, in the order of ``matrix.out_sizes``."""
        ...

    def prepare(self, layer: Linear) -> None:
        """Bring the loaded weight into the form that :meth:`apply` reads, :attr:`Matrix.prepared`; called once.

        A method that no longer needs ``layer.weight`` drops it by :meth:`Matrix.drop_weight`.
        """
        ...

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        ...

    def gather(self, table: Matrix, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids`` [T] of an embedding table, [T, in], as a new tensor that the caller may change."""
        ...


class TorchLinearMethod:
    """Weights in the model's dtype, in the memory that they are loaded into, multiplied by torch."""

    def create(self, matrix: Matrix) -> None:
        """Allocate the weight."""
        matrix.weight = parameter(sum(matrix.out_sizes), matrix.in_size, dtype=matrix.dtype, device=matrix.device)

    def tie(self, matrix: Matrix, other: Matrix) -> None:
        """Share the parameter."""
        matrix.weight = other.weight

    def destinations(self, matrix: Matrix) -> Sequence[Destination]:
        """Return the rows of each projection."""
        return torch.split(matrix.weight, list(matrix.out_sizes))

    def prepare(self, layer: Linear) -> None:
        """Keep the weight as it is."""

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        return F.linear(x, layer.weight, layer.bias)

    def gather(self, table: Matrix, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids`` [T] of an embedding table, [T, in]."""
        return F.embedding(ids, table.weight)


class Matrix(nn.Module):
    """A weight [sum(out_sizes), in_size] that its method keeps: the common part of linear layers and embeddings.

    ``weight`` is there only where the method keeps one as a parameter; ``prepared`` is whatever the method needs.
    """

    weight: nn.Parameter

    def __init__(
        self,
        in_size: int,
        out_sizes: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.in_size = in_size
        self.out_sizes = out_sizes
        self.dtype, self.device = dtype, device
        self.method: LinearMethod = method or TorchLinearMethod()
        self.prepared: Any = None
        self.method.create(self)

    def tie(self, other: Matrix) -> None:
        """Share the weight of ``other``, which has the same shape and method."""
        self.method.tie(self, other)

    def drop_weight(self) -> None:
        """Let go of the loaded weight; whoever else holds it, such as a tied embedding, keeps it."""
        del self.weight

    def destinations(self, *names: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes; ``names`` in the order of ``out_sizes``."""
        return dict(zip([f"{name}.weight" for name in names], self.method.destinations(self), strict=True))


class Linear(Matrix):
    """``x @ weight.T + bias``, for one projection or for several that share their input.

    ``weight`` [sum(out_sizes), in_size], ``bias`` [sum(out_sizes)] or ``None``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_size: int,
        out_sizes: int | tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod | None = None,
    ) -> None:
        sizes = (out_sizes,) if isinstance(out_sizes, int) else out_sizes
        super().__init__(in_size, sizes, dtype=dtype, device=device, method=method)
        self.bias = parameter(sum(sizes), dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projections of ``x`` [T, in], side by side: [T, sum(out_sizes)]."""
        return self.method.apply(self, x)

    def destinations(self, *names: str) -> dict[str, Destination]:
        """Return where each checkpoint tensor goes; ``names`` in the order of ``out_sizes``."""
        found = super().destinations(*names)
        if self.bias is not None:
            biases = torch.split(self.bias, list(self.out_sizes))
            found.update(zip([f"{name}.bias" for name in names], biases, strict=True))
        return found


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return an uninitialised parameter that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def prepare_linear_layers(model: nn.Module) -> None:
    """Bring the weights of every linear layer of ``model`` into the form of its method; call it once, after loading."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.method.prepare(module)
