"""Linear layers on the native CPU kernels: packed weights, and results that do not depend on what shares the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from asyncllm.kernels.base import Kernels, PackedWeight
    from asyncllm.layers.linear import Linear

__all__ = ["NativeLinearMethod", "packed_parts"]


class NativeLinearMethod:
    """Each projection packed as a weight of its own, stored in the smallest format that loses nothing.

    The layer's own weight is dropped as soon as it is packed: memory never holds two copies of more than one matrix.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def prepare(self, layer: Linear) -> None:
        """Pack the projections of ``layer`` and drop its weight."""
        sizes = list(layer.out_sizes)
        biases = [None] * len(sizes) if layer.bias is None else torch.split(layer.bias, sizes)
        parts = torch.split(layer.weight, sizes)
        layer.prepared = [self.kernels.pack(part, bias=bias) for part, bias in zip(parts, biases, strict=True)]
        layer.drop_weight()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        parts = packed_parts(layer)
        if len(parts) == 1:
            return self.kernels.linear(x, parts[0])
        out = torch.empty(x.shape[0], sum(layer.out_sizes))
        for part, columns in zip(parts, torch.split(out, list(layer.out_sizes), 1), strict=True):
            self.kernels.linear(x, part, out=columns)
        return out


def packed_parts(layer: Linear) -> list[PackedWeight]:
    """Return the packed projections of a layer that :class:`NativeLinearMethod` prepared."""
    return cast("list[PackedWeight]", layer.prepared)
