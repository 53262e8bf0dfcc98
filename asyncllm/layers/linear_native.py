"""Weights on the native CPU kernels: packed as they are stored, with results that no neighbour in the batch changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from asyncllm.kernels.base import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.kernels.base import Kernels, PackedWeight
    from asyncllm.layers.linear import Destination, Linear, Matrix
    from asyncllm.loader import QuantizedTensor

__all__ = ["NativeLinearMethod", "packed_parts"]

GGML_TYPE_TO_FORMAT = {stored_as.name: stored_as for stored_as in Format if stored_as.is_quantized}
PLAIN_DTYPES = {stored_as.dtype for stored_as in Format if not stored_as.is_quantized}


class NativeLinearMethod:
    """Each projection packed as a weight of its own, at the moment when it is read from the checkpoint.

    No other form of a matrix is ever allocated: memory holds what is packed and, for a quantized type that the kernels
    do not know, one dequantized matrix at a time.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def create(self, matrix: Matrix) -> None:
        """Make room for one packed weight per projection."""
        matrix.prepared = [None] * len(matrix.out_sizes)

    def tie(self, matrix: Matrix, other: Matrix) -> None:
        """Share the packed weight."""
        matrix.prepared = other.prepared

    def destinations(self, matrix: Matrix) -> Sequence[Destination]:
        """Return what packs each projection."""
        sizes = enumerate(matrix.out_sizes)
        return [_Packer(self.kernels, (size, matrix.in_size), matrix.prepared, index) for index, size in sizes]

    def prepare(self, layer: Linear) -> None:
        """Give the packed weights their biases, which come from the checkpoint at any time before or after them."""
        if layer.bias is None:
            return
        for part, bias in zip(packed_parts(layer), torch.split(layer.bias, list(layer.out_sizes)), strict=True):
            part.bias = bias.detach().float().contiguous()

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, in] times the layer's weight plus its bias, [T, out]."""
        parts = packed_parts(layer)
        if len(parts) == 1:
            return self.kernels.linear(x, parts[0])
        out = torch.empty(x.shape[0], sum(layer.out_sizes))
        for part, columns in zip(parts, torch.split(out, list(layer.out_sizes), 1), strict=True):
            self.kernels.linear(x, part, out=columns)
        return out

    def gather(self, table: Matrix, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids`` [T] of an embedding table, [T, in]."""
        (packed,) = packed_parts(table)
        return self.kernels.gather_rows(packed, ids)


class _Packer:
    """Packs one projection into its place among ``parts``."""

    def __init__(self, kernels: Kernels, shape: tuple[int, int], parts: list[PackedWeight | None], index: int) -> None:
        self.shape = shape
        self._kernels, self._parts, self._index = kernels, parts, index

    def take(self, tensor: torch.Tensor | QuantizedTensor) -> None:
        """Pack ``tensor``: known GGUF blocks as they are, anything else in the smallest format that loses nothing."""
        self._parts[self._index] = self._pack(tensor)

    def _pack(self, tensor: torch.Tensor | QuantizedTensor) -> PackedWeight:
        if not isinstance(tensor, torch.Tensor):
            stored_as = GGML_TYPE_TO_FORMAT.get(tensor.type_name)
            if stored_as is not None:
                return self._kernels.pack_blocks(tensor.blocks, stored_as)
            tensor = tensor.dequantize(torch.float32)
        return self._kernels.pack(tensor if tensor.dtype in PLAIN_DTYPES else tensor.float())


def packed_parts(matrix: Matrix) -> list[PackedWeight]:
    """Return the packed projections of a matrix that :class:`NativeLinearMethod` keeps and that was loaded."""
    return cast("list[PackedWeight]", matrix.prepared)
