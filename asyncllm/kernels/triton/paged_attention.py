"""Paged attention as torch operators: ``asyncllm::paged_attention`` and ``asyncllm::kv_write``, and their tile sizes.

Here a step's lists become launches: how many is known to the caller, how much work each has is read on the device. The
device code is in :mod:`asyncllm.kernels.triton.attention_kernels`; what is cut where, in
:mod:`asyncllm.attention.work_list`. Sizes come from a table, by the device's compute capability, the head dim and the
width of a number: nothing is tuned at run time, so results and launches are the same in every process.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.runtime.driver import driver

from asyncllm.kernels.triton.attention_kernels import kv_write_kernel, merge_parts_kernel, paged_attention_kernel
from asyncllm.kernels.triton.operators import define_operator

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "INTERPRET",
    "Tile",
    "device_capability",
    "kv_write",
    "padded_dim",
    "paged_attention",
    "small_and_large_tile",
]

INTERPRET: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

NUM_INTERPRETED_PROGRAMS = 2
MERGE_NUMBERS = 1024
"""Numbers of a part that a program merges at a time."""
PROGRAMS_PER_MULTIPROCESSOR = 4


class Tile(NamedTuple):
    """How a kernel cuts its work; part of what a result's last bits depend on."""

    rows: int
    """Tokens times query heads of a group."""
    tile: int
    """Keys that are read at a time; divides the chunks of the work list."""
    num_warps: int
    num_stages: int


def padded_dim(head_dim: int) -> int:
    """Return the head dim as the kernel has it: a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(head_dim))


def small_and_large_tile(capability: int, group: int, head_dim: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Return the tiles for few new tokens of a row (decode) and for many (prefill).

    ``capability``: 90 for 9.0; 0 where there is no device. ``group``: query heads of a key/value head. No choice spills
    registers or exceeds the shared memory of its devices: the tests compile them.
    """
    padded_group, dim = triton.next_power_of_2(group), padded_dim(head_dim)
    if not capability:  # in the interpreter large tiles only cost time
        small, large = Tile(16, 16, 4, 2), Tile(32, 16, 4, 2)
    elif dtype == torch.float32:  # which no matrix unit multiplies exactly
        small, large = Tile(16, 16, 4, 2), Tile(32, 32 if dim <= 128 else 16, 8, 2)
    else:
        small, large = _half_tiles(capability, dim, odd=group != padded_group)
    return small._replace(rows=max(small.rows, padded_group)), large._replace(rows=max(large.rows, padded_group))


def _half_tiles(capability: int, dim: int, *, odd: bool) -> tuple[Tile, Tile]:
    """Return the tiles of bfloat16 and float16. ``odd``: groups are no power of two, which takes more registers.

    A decode tile leaves room for four programs on a multiprocessor of 9.0, whose grid has four: memory is kept busy by
    many small tiles in flight. A prefill tile takes nearly all registers; its third stage is for the block ids, which
    are read before the keys that they lead to.
    """
    if dim > 128:
        return Tile(16, 32, 4, 2), Tile(64, 32, 8, 2)
    if dim <= 64:
        return Tile(16, 64, 4, 2), Tile(128, 32, 8, 2) if odd and not 90 <= capability < 120 else Tile(128, 64, 8, 3)
    small = Tile(16, 32 if odd and capability in (86, 89) else 64, 4, 2)
    if odd:
        return small, Tile(128 if capability == 90 else 64, 32, 8, 2)
    return small, Tile(128, 64, 8, 3) if capability in (80, 90) else Tile(128, 32, 8, 2)


@functools.cache
def device_capability() -> int:
    """Return 90 for a device of compute capability 9.0; 0 in the interpreter and where there is no device."""
    if INTERPRET:
        return 0
    try:
        return int(driver.active.get_current_target().arch)
    except RuntimeError:  # no driver: tensors without a device behind them
        return 0


@functools.cache
def num_programs(device_index: int) -> int:
    """Return the size of a persistent grid."""
    if INTERPRET:
        return NUM_INTERPRETED_PROGRAMS
    properties = driver.active.utils.get_device_properties(device_index)
    return PROGRAMS_PER_MULTIPROCESSOR * int(properties["multiprocessor_count"])


def _paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    small_items: torch.Tensor,
    small_merges: torch.Tensor,
    large_items: torch.Tensor,
    large_merges: torch.Tensor,
    bounds: torch.Tensor,
    part_out: torch.Tensor,
    part_stat: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    small_tile: Sequence[int],
    large_tile: Sequence[int],
    small: bool,
    merge_small: bool,
    waves: Sequence[bool],
) -> None:
    """Launch what the step needs; launches of one stream share the scratch memory one after the other."""
    _, _, block_size, num_kv_heads, head_dim = cache.shape
    num_heads = query.shape[1]
    padded = padded_dim(head_dim)
    grid = (num_programs(query.device.index or 0),)
    stride = bounds.stride(0)  # rows: small items, small merges, large items, large merges

    def attend(items: torch.Tensor, tile: Sequence[int], first_bound: int) -> None:
        rows, keys, num_warps, num_stages = tile
        paged_attention_kernel[grid](
            out,
            query,
            cache,
            slots,
            query_start,
            seq_lens,
            block_tables,
            items,
            bounds,
            part_out,
            part_stat,
            first_bound,
            scale * math.log2(math.e),
            softcap or 1.0,
            window,
            cache.stride(0),
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            items.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded,
            BLOCK_SIZE=block_size,
            ROWS=rows,
            TILE=keys,
            WINDOW=window > 0,
            SOFTCAP=softcap > 0,
            F32=query.dtype == torch.float32,
            INTERPRET=INTERPRET,
            num_warps=num_warps,
            enable_fp_fusion=True,
            num_stages=num_stages,
        )

    def merge(merges: torch.Tensor, tile: Sequence[int], first_bound: int) -> None:
        merge_parts_kernel[grid](
            out,
            part_out,
            part_stat,
            merges,
            bounds,
            first_bound,
            merges.stride(0),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded,
            TOKENS=tile[0] * num_kv_heads // num_heads,
            BLOCK_HEADS=min(triton.next_power_of_2(num_heads), max(1, MERGE_NUMBERS // padded)),
            num_warps=4,
        )

    if small:
        attend(small_items, small_tile, 0)
    if merge_small:
        merge(small_merges, small_tile, stride)
    for wave, has_merges in enumerate(waves):
        attend(large_items, large_tile, 2 * stride + wave)
        if has_merges:
            merge(large_merges, large_tile, 3 * stride + wave)


def _kv_write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    width = key.shape[1] * key.shape[2]
    kv_write_kernel[(key.shape[0],)](
        key,
        value,
        cache,
        slot_mapping,
        cache.stride(0),
        key.stride(0),
        value.stride(0),
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
        num_warps=4,
    )


def _nothing(*_: object) -> None:
    """Stand for an operator that only writes to its arguments, where tensors have no memory."""


paged_attention = define_operator(
    "paged_attention(Tensor(a!) out, Tensor query, Tensor cache, Tensor slots, Tensor query_start, Tensor seq_lens,"
    " Tensor block_tables, Tensor small_items, Tensor small_merges, Tensor large_items, Tensor large_merges,"
    " Tensor bounds, Tensor(b!) part_out, Tensor(c!) part_stat, float scale, float softcap, int window,"
    " int[] small_tile, int[] large_tile, bool small, bool merge_small, bool[] waves) -> ()",
    _paged_attention,
    _nothing,
)
"""Write to ``out`` [T, H, D] the attention of ``query`` over the blocks of each row; ``scale`` is above zero.

``small``, ``merge_small``: whether these launches are made; ``waves``: for each wave of large tiles, whether it merges.
"""

kv_write = define_operator(
    "kv_write(Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping) -> ()", _kv_write, _nothing
)
"""Store ``key`` and ``value`` [T, KV, D], heads of a token side by side, at ``slot_mapping`` [T]; -1 stores nothing."""
