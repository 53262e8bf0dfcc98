"""Tensors of GGML's types as torch has them: quantized ones in their blocks or dequantized, plain ones as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.checkpoint.gguf import GGML_TYPES
from asyncllm.kernels.ggml_blocks import TYPE_TO_FUNCTION

__all__ = ["DEQUANTIZED_TYPES", "QuantizedTensor", "dequantize"]

CHUNK_ELEMENTS = 31 * 1024
"""Numbers dequantized at once: intermediate tensors stay in the cache, below the size from which torch uses threads.

Measured on SmolLM2-135M in Q4_1, two cores: 0.75 s always. Chunks of a million numbers take 0.6 s on idle cores, and
4 s where something else runs, since each of the many short parallel operations waits for its slowest thread.
"""

NAME_TO_KIND = {kind.name: kind for kind in GGML_TYPES.values()}
PLAIN_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix in the blocks of its file, for those who compute with them; everybody else dequantizes it."""

    type_name: str
    """Name in :data:`TYPE_TO_FUNCTION`, such as ``Q4_1``."""
    blocks: torch.Tensor
    """uint8 [rows, bytes of a row]; a view of the file where nothing had to be reordered."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and numbers in a row."""
        kind = NAME_TO_KIND[self.type_name]
        return self.blocks.shape[0], self.blocks.shape[1] // kind.block_bytes * kind.block_elements

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, rounded once to ``dtype``, as a new tensor."""
        return _numbers(self.blocks, self.type_name, dtype).view(self.shape)


def dequantize(data: memoryview, type_name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the numbers in ``data`` as one flat tensor; ``None`` if we do not read this type.

    Quantized types come in ``dtype``, as a new tensor. Plain floating-point types come as they are stored, as a view of
    ``data``.
    """
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if plain := PLAIN_TYPES.get(type_name):
        return raw.view(plain)
    return _numbers(raw, type_name, dtype) if type_name in TYPE_TO_FUNCTION else None


def _numbers(raw: torch.Tensor, type_name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of the blocks in ``raw`` (uint8, contiguous) as one flat tensor."""
    function, kind = TYPE_TO_FUNCTION[type_name], NAME_TO_KIND[type_name]
    blocks = raw.view(-1, kind.block_bytes)
    numbers = torch.empty(blocks.shape[0], kind.block_elements, dtype=dtype)
    step = CHUNK_ELEMENTS // kind.block_elements
    for start in range(0, blocks.shape[0], step):
        numbers[start : start + step] = function(blocks[start : start + step])
    return numbers.view(-1)


DEQUANTIZED_TYPES = (*PLAIN_TYPES, *TYPE_TO_FUNCTION)
"""Names of all tensor types that we read."""
