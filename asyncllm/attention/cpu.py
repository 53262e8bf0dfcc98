"""Attention on the CPU in plain torch: gather each row's blocks, then one fused call per group of equal shapes.

A *tile* is up to ``MAX_TILE_QUERIES`` query tokens of one row with the tokens they can see; a decode row is a tile of
one. Tiles whose padded shapes are equal form a *group* and run as one batched call. Padding is a function of the tile's
own lengths, never of its neighbours', so that a decode row's numbers do not depend on what shares its batch.

    cache of a layer   [2 * KV, N, S * D]     keys of all heads, then values; a block of one head is contiguous
    gathered           [2, KV, R, L, D]       R tiles of the group, L = padded blocks * S

Query heads of one KV head are folded into the query dimension: keys and values are never expanded.
"""

# pyright: reportUnknownMemberType=false
# (torch does not say which arrays from_numpy takes)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncllm.attention.base import AttentionBackend, AttentionSpec, FlatBatch, copy_along, why_not_in_torch

__all__ = ["CpuAttention"]

Int64 = npt.NDArray[np.int64]

MAX_TILE_QUERIES = 256  # bounds the mask of a tile, and lets early tiles of a prompt skip the keys after them
MAX_PADDED_QUERIES = 64  # tiles up to here are padded to a power of two and share groups; longer ones keep their length
PADDING_STEPS = 8  # padded numbers of blocks between two powers of two: at most an eighth of a gather is padding
QUERY_PADDING: Int64 = np.arange(MAX_TILE_QUERIES + 1)  # padded number of queries by true number
QUERY_PADDING[1 : MAX_PADDED_QUERIES + 1] = [1 << (n - 1).bit_length() for n in range(1, MAX_PADDED_QUERIES + 1)]
ZERO, MINUS_INFINITY = np.float32(0.0), np.float32(-np.inf)
CACHE_LINE = 64
GATHER_BYTES = 8 << 20  # most gathered keys and values of a group: stays in a core's share of the last-level cache


@dataclass(slots=True)
class Tiles:
    """Columns of all tiles of a step, or of a group."""

    row: Int64
    first_token: Int64  # place of the first query in the flat batch
    first_position: Int64  # its position in the request
    num_queries: Int64
    first_block: Int64  # first block that a query of the tile can see; later than 0 only with a window
    num_blocks: Int64

    def take(self, members: Int64) -> Tiles:
        """Return the tiles at ``members``."""
        return Tiles(
            self.row[members],
            self.first_token[members],
            self.first_position[members],
            self.num_queries[members],
            self.first_block[members],
            self.num_blocks[members],
        )


@dataclass(slots=True)
class Group:
    """R tiles of one padded shape: Q queries over L tokens each; for *folded* see :meth:`CpuAttention._attend`."""

    num_tiles: int
    num_queries: int
    folded: bool
    gathered: torch.Tensor  # scratch of this group's blocks: [2 * KV, R * blocks, S * D], overwritten by each layer
    converted: torch.Tensor  # the same in the dtype of the arithmetic, where the cache has another one
    keys: torch.Tensor  # views of it as the fused call wants them
    values: torch.Tensor
    block_ids: torch.Tensor  # [R * blocks]
    mask: torch.Tensor  # additive: 0 where a query sees a token, -inf elsewhere
    gather: torch.Tensor | None  # [R * Q] place in the flat batch of each padded query; None: the batch as it is
    scatter: torch.Tensor | None  # places of the true queries; None: the batch as it is
    kept: torch.Tensor | None  # the true ones among the R * Q; None: all


@dataclass(slots=True)
class Plan:
    """One step. Groups depend on the window, which belongs to a layer, so they are made when the first layer asks."""

    batch: FlatBatch
    slots: torch.Tensor  # [T]
    window_to_groups: dict[int | None, list[Group]] = field(default_factory=dict[int | None, list[Group]])


class CpuAttention(AttentionBackend):
    """Batched gather and torch's fused attention."""

    name: ClassVar[str] = "cpu"

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._padded_blocks = np.zeros(1, np.int64)
        self._kv_dtype = spec.kv_format.dtype
        self._scratch = torch.empty(0, dtype=self._kv_dtype)
        self._converted = torch.empty(0, dtype=spec.dtype)
        self._heads_per_kv_head = spec.num_heads // spec.num_kv_heads
        self._block_bytes = self.bytes_per_block() // spec.num_layers

    @classmethod
    def why_not(cls, spec: AttentionSpec) -> str | None:
        """Return why this backend cannot serve ``spec``: it needs a CPU, and what :func:`why_not_in_torch` says."""
        if spec.device.type != "cpu":
            return f"it runs on a CPU, not on {spec.device.type}"
        return why_not_in_torch(spec)

    def bytes_per_block(self) -> int:
        """Return the memory of one block over all layers."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.block_size * spec.head_dim * self._kv_dtype.itemsize

    def allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Return one zeroed cache per layer, [2 * KV, N, S * D].

        The zeros come from the kernel page by page as blocks are first used: an idle engine does not hold its whole
        cache in memory. They must be zeros, since masked tokens are multiplied by 0, which does not silence a NaN.
        """
        spec = self.spec
        shape = (2 * spec.num_kv_heads, num_blocks, spec.block_size * spec.head_dim)
        num_bytes = int(np.prod(shape)) * self._kv_dtype.itemsize
        return [_lazy_zeros(num_bytes).view(self._kv_dtype).view(shape) for _ in range(spec.num_layers)]

    def scrub(self, caches: list[torch.Tensor], block_ids: list[int]) -> None:
        """Make every number in these blocks finite; finite ones stay as they are."""
        for cache in caches:
            for block in block_ids:
                torch.nan_to_num_(cache[:, block], nan=0.0, posinf=0.0, neginf=0.0)

    def copy_blocks(self, caches: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy blocks of keys and values."""
        copy_along(1, caches, sources, targets)

    def plan(self, batch: FlatBatch) -> Plan:
        """Return the step's plan; O(rows) numpy work, the groups are made by the first layer of each window."""
        return Plan(batch, torch.from_numpy(batch.slot_mapping))

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, plan: Plan) -> None:
        """Store ``key`` and ``value`` [T, KV, D] at the step's slots."""
        spec = self.spec
        num_kv_heads = spec.num_kv_heads
        by_slot = cache.view(2 * num_kv_heads, -1, spec.head_dim)  # [2 * KV, N * S, D]
        key, value = key.to(self._kv_dtype), value.to(self._kv_dtype)
        by_slot[:num_kv_heads].index_copy_(1, plan.slots, key.transpose(0, 1))
        by_slot[num_kv_heads:].index_copy_(1, plan.slots, value.transpose(0, 1))

    def forward(
        self, query: torch.Tensor, cache: torch.Tensor, plan: Plan, *, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Return attention of ``query`` [T, H, D] over the rows' blocks, as [T, H * D]."""
        groups = plan.window_to_groups.get(window)
        if groups is None:
            groups = plan.window_to_groups[window] = self._make_groups(plan.batch, window)
        if groups[0].scatter is None:
            return self._attend(query, cache, groups[0], scale).flatten(1)
        out = torch.empty(query.shape, dtype=query.dtype)
        for group in groups:
            queries = query if group.gather is None else query.index_select(0, group.gather)
            attended = self._attend(queries, cache, group, scale)
            if group.kept is not None:
                attended = attended.index_select(0, group.kept)
            assert group.scatter is not None
            out.index_copy_(0, group.scatter, attended)
        return out.flatten(1)

    def _attend(self, query: torch.Tensor, cache: torch.Tensor, group: Group, scale: float) -> torch.Tensor:
        """Return attention [R * Q, H, D] of a group's padded queries [R * Q, H, D].

        A folded group's batch is its tiles, its heads are the KV heads and its queries are all queries of one KV head.
        A long tile stands alone: the batch is its KV heads, and keys have stride 0 over the heads of each.
        """
        kv_heads, per_kv, head_dim = self.spec.num_kv_heads, self._heads_per_kv_head, self.spec.head_dim
        torch.index_select(cache, 1, group.block_ids, out=group.gathered)
        if group.converted is not group.gathered:
            group.converted.copy_(group.gathered)
        tiles, queries = group.num_tiles, group.num_queries
        if queries == 1:
            query = query.view(tiles, kv_heads, per_kv, head_dim)
        elif group.folded:
            query = query.view(tiles, queries, kv_heads, per_kv, head_dim).permute(0, 2, 3, 1, 4)
            query = query.reshape(tiles, kv_heads, per_kv * queries, head_dim)
        else:
            query = query.view(queries, kv_heads, per_kv, head_dim).permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(query, group.keys, group.values, attn_mask=group.mask, scale=scale)
        if queries > 1 and group.folded:
            attended = attended.view(tiles, kv_heads, per_kv, queries, head_dim).permute(0, 3, 1, 2, 4)
        elif queries > 1:
            attended = attended.permute(2, 0, 1, 3)
        return attended.reshape(-1, self.spec.num_heads, head_dim)

    def _make_groups(self, batch: FlatBatch, window: int | None) -> list[Group]:
        tiles = _cut_tiles(batch, self.spec.block_size, window)
        padded_blocks = self._pad_blocks(tiles.num_blocks)
        padded_queries = QUERY_PADDING[tiles.num_queries]
        if len(tiles.row) == 1:
            return [self._make_group(batch, tiles, window, int(padded_queries[0]), int(padded_blocks[0]))]
        key = padded_blocks * (2 * MAX_TILE_QUERIES) + padded_queries
        if padded_queries.max() > MAX_PADDED_QUERIES:  # long tiles stand alone
            key = np.where(padded_queries > MAX_PADDED_QUERIES, -1 - np.arange(len(key)), key)
        groups: list[Group] = []
        for value in np.unique(key).tolist():
            members = np.flatnonzero(key == value)
            queries, blocks = int(padded_queries[members[0]]), int(padded_blocks[members[0]])
            most = max(1, GATHER_BYTES // (blocks * self._block_bytes))
            for first in range(0, len(members), most):
                part = tiles if len(members) == len(key) <= most else tiles.take(members[first : first + most])
                groups.append(self._make_group(batch, part, window, queries, blocks))
        return groups

    def _make_group(self, batch: FlatBatch, tiles: Tiles, window: int | None, queries: int, blocks: int) -> Group:
        spec, num_tiles = self.spec, len(tiles.row)
        kv_heads, num_tokens = spec.num_kv_heads, blocks * spec.block_size
        gathered, converted = self._take_scratch(num_tiles * blocks)
        keys = converted[:kv_heads].view(kv_heads, num_tiles, num_tokens, spec.head_dim)
        values = converted[kv_heads:].view(kv_heads, num_tiles, num_tokens, spec.head_dim)
        folded = queries <= MAX_PADDED_QUERIES
        if folded:
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        else:
            keys, values = (kv.expand(-1, self._heads_per_kv_head, -1, -1) for kv in (keys, values))
        columns = np.minimum(tiles.first_block[:, None] + np.arange(blocks), batch.block_table.shape[1] - 1)
        block_ids = batch.block_table[tiles.row[:, None], columns].astype(np.int64).ravel()
        offsets = np.minimum(
            np.arange(queries), tiles.num_queries[:, None] - 1
        )  # [R, Q]: padding repeats the last query
        mask = _mask(tiles, offsets, num_tokens, spec.block_size, window)
        if folded and queries > 1:
            mask = np.tile(mask, (1, self._heads_per_kv_head, 1))
        gather, scatter, kept = _places(tiles, offsets, len(batch.positions))
        return Group(
            num_tiles,
            queries,
            folded,
            gathered,
            converted,
            keys,
            values,
            torch.from_numpy(block_ids),
            torch.from_numpy(mask).unsqueeze(1).to(spec.dtype),
            gather,
            scatter,
            kept,
        )

    def _take_scratch(self, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for blocks in the dtype of the cache and in that of the arithmetic; the same where they are."""
        spec = self.spec
        shape = (2 * spec.num_kv_heads, num_blocks, spec.block_size * spec.head_dim)
        size = shape[0] * shape[1] * shape[2]
        if size > self._scratch.numel():
            self._scratch = torch.empty(size, dtype=self._kv_dtype)
            same = self._kv_dtype == spec.dtype
            self._converted = self._scratch if same else torch.empty(size, dtype=spec.dtype)
        gathered = self._scratch[:size].view(shape)
        return gathered, gathered if self._converted is self._scratch else self._converted[:size].view(shape)

    def _pad_blocks(self, num_blocks: Int64) -> Int64:
        """Return the padded number of blocks of each tile, from a table that grows with the longest context seen."""
        longest = int(num_blocks.max())
        if longest >= len(self._padded_blocks):
            table = np.arange(2 * longest + 1)
            for power in (1 << bit for bit in range(PADDING_STEPS.bit_length() - 1, int(longest).bit_length() + 1)):
                step = power // PADDING_STEPS * 2
                between = slice(power + 1, 2 * power + 1)
                table[between] = -(-table[between] // step) * step
            self._padded_blocks = table
        return self._padded_blocks[num_blocks]


def _lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Return zeroed bytes at a cache line's border that take no memory until they are used."""
    memory = np.zeros(num_bytes + CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[begin : begin + num_bytes])


def _cut_tiles(batch: FlatBatch, block_size: int, window: int | None) -> Tiles:
    lens, seq_lens = batch.query_lens.astype(np.int64), batch.seq_lens.astype(np.int64)
    if len(batch.positions) == len(lens):  # every row has one new token
        row = np.arange(len(lens))
        tiles = Tiles(row, row, seq_lens - 1, lens, row, row)
    else:
        tiles_per_row = -(-lens // MAX_TILE_QUERIES)
        row = np.repeat(np.arange(len(lens)), tiles_per_row)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(tiles_per_row) - tiles_per_row, tiles_per_row)
        before = nth * MAX_TILE_QUERIES
        num_queries = np.minimum(lens[row] - before, MAX_TILE_QUERIES)
        first_token = batch.query_start[row] + before
        tiles = Tiles(row, first_token, (seq_lens - lens)[row] + before, num_queries, row, row)
    end_block = -(-(tiles.first_position + tiles.num_queries) // block_size)
    if window is None:
        tiles.first_block = np.zeros_like(end_block)
    else:
        tiles.first_block = np.maximum(tiles.first_position - window + 1, 0) // block_size
    tiles.num_blocks = end_block - tiles.first_block
    return tiles


def _mask(
    tiles: Tiles, offsets: Int64, num_tokens: int, block_size: int, window: int | None
) -> npt.NDArray[np.float32]:
    """Return the additive mask [R, Q, L]."""
    query = (tiles.first_position - tiles.first_block * block_size)[:, None] + offsets  # [R, Q] place among the L
    token = np.arange(num_tokens)
    hidden = token > query[:, :, None]
    if window is not None:
        hidden |= token <= query[:, :, None] - window
    return np.where(hidden, MINUS_INFINITY, ZERO)


def _places(
    tiles: Tiles, offsets: Int64, num_batch_tokens: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (gather, scatter, kept) of a :class:`Group`."""
    places = tiles.first_token[:, None] + offsets
    true = np.less(np.arange(int(offsets.shape[1])), tiles.num_queries[:, None])
    whole = places.size == num_batch_tokens  # all true, and in order unless groups were reordered
    if whole and true.all() and (len(places) == 1 or (np.diff(places.ravel()) == 1).all()):
        return None, None, None
    gather = torch.from_numpy(places.ravel())
    if true.all():
        return gather, gather, None
    return gather, torch.from_numpy(places[true]), torch.from_numpy(np.flatnonzero(true))
