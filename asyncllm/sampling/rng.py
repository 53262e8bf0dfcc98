"""Uniform numbers that are a pure function of (seed, sample index, output position): nothing is drawn from a state.

So the draw of a request is the same alone, in a batch, after a preemption and on another device. The function is
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011); the known answers of its
reference implementation, Random123, are in the tests.

    key      seed, low and high 32 bits
    counter  position (low, high), sample index, 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["philox4x32", "uniforms"]

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
VECTOR_MIN = 16  # rows from which numpy (0.07 ms, nearly whatever their number) beats integers one by one (4 µs each)


def uniforms(
    seeds: Sequence[int] | npt.NDArray[np.uint64],
    sample_indices: Sequence[int] | npt.NDArray[np.int64],
    positions: Sequence[int] | npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) with 53 random bits per row."""
    if len(seeds) < VECTOR_MIN:
        return np.array(
            [
                _uniform(int(seed), int(sample), int(position))
                for seed, sample, position in zip(seeds, sample_indices, positions, strict=True)
            ],
            np.float64,
        )
    key = np.asarray(seeds, np.uint64)
    place = np.asarray(positions, np.uint64)
    counter = (place & _U32, place >> _SHIFT, np.asarray(sample_indices, np.uint64), np.zeros_like(place))
    high, low, _, _ = _philox_columns(counter, (key & _U32, key >> _SHIFT))
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words that Philox4x32-10 gives for four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def _uniform(seed: int, sample_index: int, position: int) -> float:
    high, low, _, _ = philox4x32((position & MASK, position >> 32, sample_index, 0), (seed & MASK, seed >> 32))
    return ((high << 21) | (low >> 11)) * 2.0**-53


Column = npt.NDArray[np.uint64]
_U32, _SHIFT = np.uint64(MASK), np.uint64(32)


def _philox_columns(
    counter: tuple[Column, Column, Column, Column], key: tuple[Column, Column]
) -> tuple[Column, Column, Column, Column]:
    """Return :func:`philox4x32` of many rows, each word a column of 64-bit integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = np.uint64(MULTIPLIER_0) * c0, np.uint64(MULTIPLIER_1) * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _U32, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _U32
        k0, k1 = (k0 + np.uint64(WEYL_0)) & _U32, (k1 + np.uint64(WEYL_1)) & _U32
    return c0, c1, c2, c3
