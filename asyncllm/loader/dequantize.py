"""The numbers of GGML's tensor types, dequantized with torch.

Every function takes blocks as bytes [N, block bytes] and returns float32 [N, block elements], in the order of
operations of ggml's ``dequantize_row_*`` (ggml/src/ggml-quants.c), so that the result is the same bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from asyncllm.checkpoint.gguf import GGML_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

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


def _half(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the float16 at byte ``offset`` of each block, as float32 [N, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return [N, 2 * bytes]: the low halves of all bytes, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return [N, 8 / width, bytes]: the ``width`` lowest bits of each byte, then the next ones, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (packed[:, None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _bit_per_number(packed: torch.Tensor) -> torch.Tensor:
    """Return [N, 8 * bytes]: the bits of each byte in turn, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    fives = _nibbles(blocks[:, 6:]) | (_bit_per_number(blocks[:, 2:6]) << 4)
    return _half(blocks, 0) * (fives.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    fives = _nibbles(blocks[:, 8:]) | (_bit_per_number(blocks[:, 4:8]) << 4)
    return _half(blocks, 0) * fives.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 scales and minima of 4 bits (16), 2-bit numbers (64), scale, minimum."""
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    scale = _half(blocks, 80) * (scales & 15).float()  # [N, 16]
    minimum = _half(blocks, 82) * (scales >> 4).float()
    return _grouped(_twos(packed).float(), scale, minimum)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """High bits (32), low 2 bits (64), 16 scales of 6 bits (12), scale."""
    high = _bits(blocks[:, :32], 1)  # [N, 8, 32]
    numbers = _twos(blocks[:, 32:96]).float() - 4 * (1 - high.flatten(1).float())
    packed = blocks[:, 96:108]
    low_scales = _nibbles(packed[:, :8])
    high_scales = _bits(packed[:, 8:], 2).flatten(1)  # [N, 16]
    scale = _half(blocks, 108) * ((low_scales | (high_scales << 4)).float() - 32)
    return _grouped(numbers, scale, None)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum, 8 scales and 8 minima of 6 bits (12), 4-bit numbers (128)."""
    scale, minimum = _scales_and_minima(blocks)
    return _grouped(_nibble_groups(blocks[:, 16:]).float(), scale, minimum)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """As Q4_K, with the fifth bits (32) before the lower four."""
    scale, minimum = _scales_and_minima(blocks)
    fifth = _bits(blocks[:, 16:48], 1).flatten(1)  # [N, 8 * 32]
    return _grouped((_nibble_groups(blocks[:, 48:]) | (fifth << 4)).float(), scale, minimum)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Low 4 bits (128), high 2 bits (64), 16 scales (16), scale."""
    low = torch.stack([_nibbles(part) for part in (blocks[:, :64], blocks[:, 64:128])], 1)  # [N, 2, 128]
    high = torch.stack([_bits(part, 2).flatten(1) for part in (blocks[:, 128:160], blocks[:, 160:192])], 1)
    numbers = (low | (high << 4)).flatten(1).float() - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _grouped(numbers, scale, None)


def _twos(packed: torch.Tensor) -> torch.Tensor:
    """Return 2-bit numbers [N, 256] of two runs of 32 bytes, each holding four runs of 32 numbers by bit position."""
    return torch.cat([_bits(packed[:, :32], 2).flatten(1), _bits(packed[:, 32:], 2).flatten(1)], 1)


def _nibble_groups(packed: torch.Tensor) -> torch.Tensor:
    """Return 4-bit numbers [N, 256] of four runs of 32 bytes, each holding its low halves and then its high halves."""
    runs = packed.view(-1, 4, 32) if packed.is_contiguous() else packed.reshape(-1, 4, 32)
    return _nibbles(runs).flatten(1)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 scales and 8 minima [N, 8] from the 16 bytes that begin a Q4_K or Q5_K block."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _grouped(numbers: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor | None) -> torch.Tensor:
    """Return ``scale * numbers - minimum`` with one scale and minimum [N, G] per equal run of the numbers [N, 256]."""
    runs = numbers.view(numbers.shape[0], scale.shape[1], -1)
    scaled = scale[:, :, None] * runs
    return (scaled if minimum is None else scaled - minimum[:, :, None]).flatten(1)


TYPE_TO_FUNCTION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}

DEQUANTIZED_TYPES = (*PLAIN_TYPES, *TYPE_TO_FUNCTION)
"""Names of all tensor types that we read."""
