"""Which KV blocks each slot of the persistent batch owns, in order: a matrix of block ids, 0 where there is none.

The host has the whole matrix. A device with memory of its own has a copy, which follows by differences: rows of new
requests when they come, single blocks as rows grow. What a row held before stays in the device's copy beyond its end;
nobody reads there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockTable"]


class BlockTable:
    """Rows of block ids by slot. Block 0 is the null block: unused entries point there."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-(max_model_len + 1) // block_size)
        self.ids = np.zeros((num_slots, self.max_blocks), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.flat = self.ids.reshape(-1)

    def put(self, slot: int, block_ids: Sequence[int]) -> None:
        """Make ``block_ids`` the whole row of ``slot``."""
        row, count = self.ids[slot], len(block_ids)
        row[:count] = block_ids
        row[count : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = count

    def append(self, slot: int, block_ids: Sequence[int]) -> range:
        """Add ``block_ids`` to the end of the row of ``slot``; return where they are in the flattened matrix."""
        count = int(self.num_blocks[slot])
        end = count + len(block_ids)
        self.ids[slot, count:end] = block_ids
        self.num_blocks[slot] = end
        return range(slot * self.max_blocks + count, slot * self.max_blocks + end)

    def clear(self, slot: int) -> None:
        """Empty the row of ``slot``."""
        self.ids[slot, : self.num_blocks[slot]] = 0
        self.num_blocks[slot] = 0

    def rows(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return a copy of the rows of ``slots``, as wide as the longest of them."""
        width = int(self.num_blocks[slots].max(initial=1))
        return self.ids[slots, :width]

    def block_ids(self, slot: int) -> list[int]:
        """Return the blocks of ``slot``."""
        return self.ids[slot, : self.num_blocks[slot]].tolist()

    def kv_slots(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], out: npt.NDArray[np.int64]
    ) -> None:
        """Write ``block id * block size + offset`` of each token (its slot, its position) to ``out``."""
        block, offset = np.divmod(positions, self.block_size)
        block += slots * self.max_blocks
        np.multiply(self.flat[block], self.block_size, out=out)
        out += offset
