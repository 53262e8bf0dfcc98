"""Rows of GGUF blocks of every type that the kernels know."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from asyncllm.kernels.base import Format

__all__ = ["gguf_rows", "gguf_values"]

FACTOR_OFFSETS = {
    Format.Q2_K: (80, 82),
    Format.Q3_K: (108,),
    Format.Q4_K: (0, 2),
    Format.Q5_K: (0, 2),
    Format.Q6_K: (208,),
}
"""Where the float16 of a block are, of those types that the ``gguf`` package does not write."""


def gguf_rows(n: int, k: int, stored_as: Format) -> torch.Tensor:
    """Return random numbers as ``n`` rows of blocks, uint8 [n, bytes of a row]."""
    if stored_as in FACTOR_OFFSETS:
        return _random_blocks(n, k, stored_as)
    numbers = np.random.default_rng(0).standard_normal((n, k), np.float32)
    return torch.from_numpy(gguf.quantize(numbers, gguf.GGMLQuantizationType[stored_as.name]))


def gguf_values(rows: torch.Tensor, stored_as: Format) -> torch.Tensor:
    """Return the numbers of ``rows`` as the ``gguf`` package reads them, float32 [n, k]."""
    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[stored_as.name]))


def _random_blocks(n: int, k: int, stored_as: Format) -> torch.Tensor:
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (n * k // stored_as.block_values, stored_as.block_bytes), np.uint8)
    for offset in FACTOR_OFFSETS[stored_as]:
        factors = (random.standard_normal(len(raw)) * 0.01).astype(np.float16)
        raw[:, offset : offset + 2] = factors.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(raw.reshape(n, stored_as.row_bytes(k)))
