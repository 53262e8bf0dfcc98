"""The numbers in GGML's quantized blocks, in torch: for the torch path, and for what the compiled kernels are held to.

Every function takes blocks as bytes [N, block bytes] and returns float32 [N, block elements], in the order of
operations of ggml's ``dequantize_row_*`` (ggml/src/ggml-quants.c), so that the result is the same bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TYPE_TO_FUNCTION"]


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
"""By the name of the type in a GGUF file."""
