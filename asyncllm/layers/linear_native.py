"""Weights on the native CPU kernels, with results that no neighbour in the batch changes.

They are packed as they are stored, or quantized while they are packed; a model is never held in two forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from asyncllm.kernels.base import Format
from asyncllm.layers.embedding import Embedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.kernels.base import Kernels, PackedWeight
    from asyncllm.layers.linear import Destination, Linear, Matrix
    from asyncllm.loader import QuantizedTensor

__all__ = ["NativeLinearMethod", "packed_parts"]

GGML_TYPE_TO_FORMAT = {stored_as.name: stored_as for stored_as in Format if stored_as.is_quantized}
PLAIN_DTYPES = {stored_as.dtype for stored_as in Format if stored_as.is_plain}


class NativeLinearMethod:
    """Each projection packed as a weight of its own, at the moment when it is read from the checkpoint.

    No other form of a matrix is ever allocated: memory holds what is packed and, for a quantized type that the kernels
    do not know, one dequantized matrix at a time.

    ``quantization``: ``int8`` packs plain matrices as Q8_0, ``int4`` as Q4_1 except embedding and head, which stay at 8
    bits; with either, all quantized matrices are multiplied in integers. A GGUF's quantized matrices keep their values,
    and those of a type that the kernels do not know their float32 arithmetic.
    """

    def __init__(self, kernels: Kernels, quantization: str | None = None) -> None:
        self.kernels = kernels
        self._quantization = quantization
        self._vocabularies: set[int] = set()  # rows of embeddings: a head has as many

    def create(self, matrix: Matrix) -> None:
        """Make room for one packed weight per projection."""
        matrix.prepared = [None] * len(matrix.out_sizes)
        if isinstance(matrix, Embedding):
            self._vocabularies.update(matrix.out_sizes)

    def tie(self, matrix: Matrix, other: Matrix) -> None:
        """Share the packed weight."""
        matrix.prepared = other.prepared

    def destinations(self, matrix: Matrix) -> Sequence[Destination]:
        """Return what packs each projection."""
        sizes, plain_as = enumerate(matrix.out_sizes), self._plain_format(matrix)
        return [_Packer(self.kernels, (size, matrix.in_size), matrix.prepared, at, plain_as) for at, size in sizes]

    def _plain_format(self, matrix: Matrix) -> Format | None:
        """Return what plain numbers of ``matrix`` are quantized to; ``None``: they are kept."""
        if self._quantization is None:
            return None
        is_vocabulary = len(matrix.out_sizes) == 1 and matrix.out_sizes[0] in self._vocabularies
        return Format.Q4_1 if self._quantization == "int4" and not is_vocabulary else Format.Q8_0

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

    def __init__(
        self,
        kernels: Kernels,
        shape: tuple[int, int],
        parts: list[PackedWeight | None],
        index: int,
        plain_as: Format | None,
    ) -> None:
        self.shape = shape
        self._kernels, self._parts, self._index = kernels, parts, index
        self._plain_as = plain_as
        self._integer = plain_as is not None

    def take(self, tensor: torch.Tensor | QuantizedTensor) -> None:
        """Pack ``tensor``: known GGUF blocks as they are, plain numbers as they are stored or quantized."""
        self._parts[self._index] = self._pack(tensor)

    def _pack(self, tensor: torch.Tensor | QuantizedTensor) -> PackedWeight:
        if not isinstance(tensor, torch.Tensor):
            stored_as = GGML_TYPE_TO_FORMAT.get(tensor.type_name)
            if stored_as is not None:
                return self._kernels.pack_blocks(tensor.blocks, stored_as, integer=self._integer)
            return self._kernels.pack(tensor.dequantize(torch.float32))
        plain = tensor if tensor.dtype in PLAIN_DTYPES else tensor.float()
        return self._kernels.pack(plain, self._plain_as, integer=self._integer)


def packed_parts(matrix: Matrix) -> list[PackedWeight]:
    """Return the packed projections of a matrix that :class:`NativeLinearMethod` keeps and that was loaded."""
    return cast("list[PackedWeight]", matrix.prepared)
