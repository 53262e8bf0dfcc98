"""Cut a step's attention into items of bounded size, on the host, in numpy, from lengths alone.

An item is one query tile of one row over one range of its tokens. Rows whose new tokens fill at most one small tile
(decode) are worked on in small tiles, all others (prefill) in large ones. A long range is cut into parts, whose results
go to scratch memory, and a merge item says which parts belong together. Nothing here knows a device or a kernel.

Invariant: whether and where a row is cut depends on its own two lengths and constants of the engine, never on the other
rows, so its sums are taken in the same order whatever the batch. Cuts lie on a fixed grid of the row's tokens, whose
step is the smallest ``chunk * 2**k`` that needs no more parts than are allowed: short rows get parallel work, long ones
bounded scratch memory. One plan serves layers with and without a window, parts outside of the window being empty.

One row's parts never take more scratch than is there. Where those of all rows of large tiles do, the rows are worked on
in waves, one after the other, which share the scratch: that changes when a part is computed, not what it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asyncllm.attention.base import StepField, StepLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LARGE_ITEMS", "LARGE_MERGES", "SMALL_ITEMS", "SMALL_MERGES", "Launches", "WorkList", "WorkListLimits"]

Int32 = npt.NDArray[np.int32]

ITEM_PARTS = 5
"""Arrays of an item list: row, first token of the tile in the row's new tokens, first and end position of the range,
first slot in scratch or -1 where the range is whole."""
MERGE_PARTS = 4
"""Arrays of a merge list: first token in the flat batch, number of tokens, first slot of the first part, parts."""

SMALL_CHUNK = 256
LARGE_CHUNK = 1024
SMALL_ITEMS, SMALL_MERGES, LARGE_ITEMS, LARGE_MERGES = range(4)
"""Rows of ``attn_bounds``: wave w works on the items from the w-th number on to the next. All small ones are wave 0."""


@dataclass(frozen=True, kw_only=True)
class WorkListLimits:
    """Constants of an engine: all that decides how a row is cut, besides its own lengths."""

    small_tokens: int
    """New tokens in a small tile."""
    large_tokens: int
    """New tokens in a large tile."""
    max_parts: int
    """Parts of a row, over all of its tiles, at most."""
    small_chunk: int
    large_chunk: int
    """Tokens in a part, at least: multiples of the kernel's tile."""


@dataclass(kw_only=True)
class Launches:
    """Which launches of a step have work; how much, the device reads in the field ``attn_bounds``."""

    num_small_items: int
    num_small_merges: int
    waves: list[bool] = field(default_factory=list[bool])
    """For each wave of large tiles, whether it has parts to merge."""


class WorkList:
    """The planner of one engine: capacities known at its start, and the arrays of each step filled in place."""

    def __init__(self, limits: WorkListLimits, step: StepLimits) -> None:
        self.limits = limits
        self.step = step
        rows, tokens = step.max_num_seqs, step.max_num_batched_tokens
        self.small_parts = min(limits.max_parts, _ceil_div(step.max_model_len, limits.small_chunk))
        self.large_parts = min(limits.max_parts, _ceil_div(step.max_model_len, limits.large_chunk))
        large_rows = min(rows, tokens // (limits.small_tokens + 1))
        self.max_row_slots = limits.large_tokens * self.large_parts if self.large_parts > 1 and large_rows else 0
        self.num_slots = max(rows * self.small_parts if self.small_parts > 1 else 0, 2 * self.max_row_slots)
        """Slots of scratch memory; each holds one token's partial result of all heads."""
        self.max_waves = 1
        if self.max_row_slots:
            most = min(large_rows * self.max_row_slots, tokens * self.large_parts)
            self.max_waves = _ceil_div(most, self.slots_of_a_wave())
        self.capacity = {
            "attn_small_items": rows * self.small_parts,
            "attn_small_merges": rows,
            "attn_large_items": max(1, large_rows * self.large_parts + tokens // limits.large_tokens),
            "attn_large_merges": max(
                1, min(large_rows * (self.large_parts // 2 + 1), tokens // limits.large_tokens + large_rows)
            ),
        }

    def fields(self) -> list[StepField]:
        """Return the arrays that :meth:`plan` fills."""
        shapes = [
            (name, (ITEM_PARTS if name.endswith("items") else MERGE_PARTS, size))
            for name, size in self.capacity.items()
        ]
        shapes.append(("attn_bounds", (4, self.max_waves + 1)))
        return [StepField(name, shape, np.int32) for name, shape in shapes]

    def slots_of_a_wave(self) -> int:
        """Return the slots within which the rows of a wave begin; what is left beyond is enough for any row's end."""
        return self.num_slots - self.max_row_slots

    def plan(self, query_lens: Int32, seq_lens: Int32, fields: Mapping[str, npt.NDArray[Any]]) -> Launches:
        """Fill the step's arrays from the lengths [B] of its rows; O(B + items) without a loop over rows."""
        fields["attn_bounds"][:] = 0
        if query_lens.max(initial=0) <= self.limits.small_tokens:
            return self._plan_small(None, query_lens, seq_lens, _starts(query_lens), fields)
        starts = _starts(query_lens)
        is_small = query_lens <= self.limits.small_tokens
        small, large = np.flatnonzero(is_small), np.flatnonzero(~is_small)
        plan = self._plan_small(small, query_lens[small], seq_lens[small], starts[small], fields)
        self._plan_large(plan, large, query_lens[large], seq_lens[large], starts[large], fields)
        return plan

    def _plan_small(
        self,
        rows: npt.NDArray[np.intp] | None,
        query_lens: Int32,
        seq_lens: Int32,
        starts: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]],
    ) -> Launches:
        """Fill the lists of rows of one small tile each; ``rows``: their numbers, ``None`` where these are all rows."""
        chunk = _chunks(seq_lens, self.limits.small_chunk, np.maximum(self.small_parts // query_lens, 1))
        parts = -(-seq_lens // chunk)
        ends = np.cumsum(parts)
        num_items = int(ends[-1]) if len(ends) else 0
        items = fields["attn_small_items"][:, :num_items]
        local = np.repeat(np.arange(len(parts)), parts)  # the row of each item
        part = np.arange(num_items) - (ends - parts)[local]
        is_cut = parts > 1
        slots = np.where(is_cut, parts * query_lens, 0)
        first_slot = np.cumsum(slots) - slots
        items[0] = local if rows is None else rows[local]
        items[1] = 0
        items[2] = part * chunk[local]
        np.minimum(items[2] + chunk[local], seq_lens[local], out=items[3], casting="unsafe")
        items[4] = np.where(is_cut[local], first_slot[local] + part * query_lens[local], -1)
        cut = np.flatnonzero(is_cut)
        merges = fields["attn_small_merges"][:, : len(cut)]
        merges[0], merges[1], merges[2], merges[3] = starts[cut], query_lens[cut], first_slot[cut], parts[cut]
        fields["attn_bounds"][SMALL_ITEMS, 1] = num_items
        fields["attn_bounds"][SMALL_MERGES, 1] = len(cut)
        return Launches(num_small_items=num_items, num_small_merges=len(cut))

    def _plan_large(
        self,
        plan: Launches,
        rows: npt.NDArray[np.intp],
        query_lens: Int32,
        seq_lens: Int32,
        starts: npt.NDArray[np.int64],
        fields: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Fill the lists of rows of large tiles: tiles first, then the parts of each tile, then waves."""
        size = self.limits.large_tokens
        num_tiles = -(-query_lens // size)
        chunk = _chunks(seq_lens, self.limits.large_chunk, np.maximum(self.large_parts // num_tiles, 1))
        tile_row = np.repeat(np.arange(len(rows)), num_tiles)  # [tiles]
        first = (np.arange(len(tile_row)) - (np.cumsum(num_tiles) - num_tiles)[tile_row]) * size
        tokens = np.minimum(query_lens[tile_row] - first, size)
        end = seq_lens[tile_row] - query_lens[tile_row] + first + tokens  # the last token's position, plus one
        parts = -(-end // chunk[tile_row])
        slots = np.where(parts > 1, parts * tokens, 0)
        first_slot, wave = self._waves(slots, tile_row, len(rows))

        order = np.lexsort(
            (-np.minimum(end, chunk[tile_row]), wave)
        )  # in a wave the longest first: less waiting at its end
        tile = np.repeat(order, parts[order])  # [items]
        part = np.arange(len(tile)) - np.repeat(np.cumsum(parts[order]) - parts[order], parts[order])
        items = fields["attn_large_items"][:, : len(tile)]
        step = chunk[tile_row[tile]]
        items[0] = rows[tile_row[tile]]
        items[1] = first[tile]
        items[2] = part * step
        items[3] = np.minimum(items[2] + step, end[tile])
        items[4] = np.where(parts[tile] > 1, first_slot[tile] + part * tokens[tile], -1)
        cut = order[parts[order] > 1]
        merges = fields["attn_large_merges"][:, : len(cut)]
        merges[0] = starts[tile_row[cut]] + first[cut]
        merges[1], merges[2], merges[3] = tokens[cut], first_slot[cut], parts[cut]

        waves = np.arange(1, self.max_waves + 1)
        item_ends = np.searchsorted(wave[tile], waves)
        merge_ends = np.searchsorted(wave[cut], waves)
        fields["attn_bounds"][LARGE_ITEMS, 1:] = item_ends
        fields["attn_bounds"][LARGE_MERGES, 1:] = merge_ends
        plan.waves = (np.diff(merge_ends, prepend=0) > 0)[: int(wave[order[-1]]) + 1].tolist()

    def _waves(
        self, slots: npt.NDArray[np.int64], tile_row: npt.NDArray[np.intp], num_rows: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the first slot of each tile, and the wave in which it is worked on, with all tiles of its row."""
        before = np.cumsum(slots) - slots
        if not slots.any():
            return before, np.zeros_like(before)
        row_slots = np.bincount(tile_row, weights=slots, minlength=num_rows).astype(np.int64)
        row_before = np.cumsum(row_slots) - row_slots
        wave = np.where(row_slots > 0, row_before // self.slots_of_a_wave(), 0)
        wave_first = np.full(int(wave.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(wave_first, wave, row_before)
        return before - wave_first[wave[tile_row]], wave[tile_row]


def _chunks(seq_lens: Int32, chunk: int, parts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the smallest ``chunk * 2**k`` of which ``parts`` cover each row."""
    need = -(-seq_lens // (chunk * parts))
    return np.int64(chunk) << np.frexp(need - 1)[1].astype(np.int64)


def _starts(lens: Int32) -> npt.NDArray[np.int64]:
    return np.cumsum(lens) - lens


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
