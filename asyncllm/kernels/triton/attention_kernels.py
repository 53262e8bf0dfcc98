"""The device code of paged attention: one kernel for all query tiles, one that merges parts, one that stores keys.

The grids are persistent: a program takes every n-th item of a list whose length it reads on the device, so a captured
launch serves every later step. Padding has no items. Where a row is cut is the host's decision
(:mod:`asyncllm.attention.work_list`); a program computes one tile of one head group over one range of tokens.

Invariant: a token's sums are taken in the order of its row's tokens, tile by tile on a grid that begins at position 0;
what other rows of a tile see changes nothing, as masked tiles multiply by one and add zero. Nothing past a row's last
token is read. Source: Dao 2023 (online softmax), split along the keys as in Flash-Decoding.
"""

# Kernels are read by Triton's compiler, not called by Python.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

__all__ = ["kv_write_kernel", "merge_parts_kernel", "paged_attention_kernel"]


@triton.jit
def _dot(a, b, acc, F32: tl.constexpr, INTERPRET: tl.constexpr):
    """Return ``acc + a @ b`` in float32."""
    if F32:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    elif INTERPRET:  # the interpreter multiplies the raw bits of bfloat16
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _soft_cap(scores, scale_log2, softcap):
    """Return ``softcap * tanh(scores * scale / softcap)`` in units of log2."""
    x = scores * (scale_log2 * 0.6931471805599453 / softcap)
    e = tl.exp(-2.0 * tl.abs(x))
    tanh = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -tanh, tanh) * (softcap * 1.4426950408889634)


@triton.jit
def _attend(
    acc,  # [ROWS, PADDED_DIM] sum of weighted values
    total,  # [ROWS] sum of weights
    largest,  # [ROWS] largest score, in units of log2
    query,
    position,
    start,
    end,
    table,
    cache,
    value_offset,
    scale_log2,
    softcap,
    window,
    STRIDE_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    F32: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Return the three sums with the keys ``start … start + TILE`` in them.

    ``MASKED``: not every token sees every key, or there are fewer. Both forms round alike, so that it is all one to a
    token which its tile took: hence the explicit multiply-adds, which leave the compiler none to choose.
    """
    dims = tl.arange(0, PADDED_DIM)
    key_position = start + tl.arange(0, TILE)
    if MASKED:
        key_ok = key_position < end
        block = tl.load(table + key_position // BLOCK_SIZE, mask=key_ok, other=0).to(tl.int64)
    else:
        block = tl.load(table + key_position // BLOCK_SIZE).to(tl.int64)
    place = (block * BLOCK_SIZE + key_position % BLOCK_SIZE) * STRIDE_TOKEN
    keys = cache + place[None, :] + dims[:, None]
    values = cache + value_offset + place[:, None] + dims[None, :]
    if MASKED:
        dim_ok = dims < HEAD_DIM
        key = tl.load(keys, mask=dim_ok[:, None] & key_ok[None, :], other=0.0)
        value = tl.load(values, mask=key_ok[:, None] & dim_ok[None, :], other=0.0)
    elif HEAD_DIM < PADDED_DIM:
        dim_ok = dims < HEAD_DIM
        key = tl.load(keys, mask=dim_ok[:, None], other=0.0)
        value = tl.load(values, mask=dim_ok[None, :], other=0.0)
    else:
        key = tl.load(keys)
        value = tl.load(values)
    scores = _dot(query, key.to(query.dtype), tl.zeros([query.shape[0], TILE], tl.float32), F32, INTERPRET)
    if SOFTCAP:
        scores = _soft_cap(scores, scale_log2, softcap)
        scale_log2 = 1.0
    if MASKED:
        seen = key_ok[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale_log2)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
    fade = tl.exp2(largest - base)
    total = tl.fma(total, fade, tl.sum(weights, 1))
    acc = _dot(weights.to(query.dtype), value.to(query.dtype), acc * fade[:, None], F32, INTERPRET)
    return acc, total, new_largest


@triton.jit(do_not_specialize=["first_bound"])  # its number of variants would grow with the waves
def paged_attention_kernel(
    out_ptr,  # [T, H, D]
    query_ptr,  # [T, H, D] by strides
    cache_ptr,  # [2, N, S, KV, D]
    slots_ptr,  # [B] the row of tables_ptr that each row owns
    query_start_ptr,  # [B + 1]
    seq_lens_ptr,  # [B]
    tables_ptr,  # [slots, blocks]
    items_ptr,  # [5, capacity]
    bounds_ptr,
    part_out_ptr,  # [scratch slots, H, D] float32
    part_stat_ptr,  # [scratch slots, 2, H] float32: largest score, sum of weights
    first_bound,
    scale_log2,
    softcap,
    window,
    value_offset,
    stride_query_token,
    stride_query_head,
    stride_table,
    stride_items,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    F32: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Compute the items ``bounds[first_bound] … bounds[first_bound + 1]`` for every head group.

    A tile holds ``ROWS // GROUP`` tokens times the query heads that share a key/value head.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    TOKENS: tl.constexpr = ROWS // GROUP
    STRIDE_TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    first_item = tl.load(bounds_ptr + first_bound)
    num_items = tl.load(bounds_ptr + first_bound + 1) - first_item
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    dim_ok = dims < HEAD_DIM
    for work in range(tl.program_id(0), num_items * NUM_KV_HEADS, tl.num_programs(0)):
        item = items_ptr + first_item + work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        row = tl.load(item)
        first_token = tl.load(item + stride_items)
        begin = tl.load(item + stride_items * 2)
        end = tl.load(item + stride_items * 3)
        slot = tl.load(item + stride_items * 4)

        row_start = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - row_start
        context = tl.load(seq_lens_ptr + row) - query_len
        table = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table

        token = first_token + rows // GROUP
        row_ok = (rows < TOKENS * GROUP) & (token < query_len)
        head = kv_head * GROUP + rows % GROUP
        position = context + token
        query = tl.load(
            query_ptr
            + (row_start + token).to(tl.int64)[:, None] * stride_query_token
            + head[:, None] * stride_query_head
            + dims[None, :],
            mask=row_ok[:, None] & dim_ok[None, :],
            other=0.0,
        )
        if WINDOW:
            oldest = tl.maximum(context + first_token - window + 1, 0)
            begin = tl.maximum(begin, oldest // TILE * TILE)

        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        cache = cache_ptr + kv_head * HEAD_DIM
        masked = begin
        if not WINDOW:
            masked = tl.maximum(begin, tl.minimum(end, context + first_token + 1) // TILE * TILE)
            for start in range(begin, masked, TILE):
                acc, total, largest = _attend(
                    acc,
                    total,
                    largest,
                    query,
                    position,
                    start,
                    end,
                    table,
                    cache,
                    value_offset,
                    scale_log2,
                    softcap,
                    window,
                    STRIDE_TOKEN,
                    HEAD_DIM,
                    PADDED_DIM,
                    BLOCK_SIZE,
                    TILE,
                    False,
                    WINDOW,
                    SOFTCAP,
                    F32,
                    INTERPRET,
                )
        for start in range(masked, end, TILE):
            acc, total, largest = _attend(
                acc,
                total,
                largest,
                query,
                position,
                start,
                end,
                table,
                cache,
                value_offset,
                scale_log2,
                softcap,
                window,
                STRIDE_TOKEN,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                TILE,
                True,
                WINDOW,
                SOFTCAP,
                F32,
                INTERPRET,
            )

        if slot >= 0:
            at = (slot + rows // GROUP).to(tl.int64)
            tl.store(
                part_out_ptr + (at * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :],
                acc,
                mask=row_ok[:, None] & dim_ok[None, :],
            )
            tl.store(part_stat_ptr + at * (2 * NUM_HEADS) + head, largest, mask=row_ok)
            tl.store(part_stat_ptr + at * (2 * NUM_HEADS) + NUM_HEADS + head, total, mask=row_ok)
        else:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(
                out_ptr + ((row_start + token).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=row_ok[:, None] & dim_ok[None, :],
            )


@triton.jit(do_not_specialize=["first_bound"])
def merge_parts_kernel(
    out_ptr,  # [T, H, D]
    part_out_ptr,
    part_stat_ptr,
    merges_ptr,  # [4, capacity]
    bounds_ptr,
    first_bound,
    stride_merges,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Merge the parts of each tile in their order, for ``BLOCK_HEADS`` heads of one token at a time."""
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    first_merge = tl.load(bounds_ptr + first_bound)
    num_merges = tl.load(bounds_ptr + first_bound + 1) - first_merge
    dims = tl.arange(0, PADDED_DIM)
    for work in range(tl.program_id(0), num_merges * (TOKENS * HEAD_BLOCKS), tl.num_programs(0)):
        merge = merges_ptr + first_merge + work // (TOKENS * HEAD_BLOCKS)
        token = work // HEAD_BLOCKS % TOKENS
        num_tokens = tl.load(merge + stride_merges)
        if token < num_tokens:
            out_token = tl.load(merge).to(tl.int64) + token
            first_slot = tl.load(merge + stride_merges * 2)
            num_parts = tl.load(merge + stride_merges * 3)
            heads = work % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            head_ok = heads < NUM_HEADS
            ok = head_ok[:, None] & (dims < HEAD_DIM)[None, :]
            largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_HEADS], tl.float32)
            acc = tl.zeros([BLOCK_HEADS, PADDED_DIM], tl.float32)
            for part in range(num_parts):
                at = (first_slot + part * num_tokens + token).to(tl.int64)
                stat = part_stat_ptr + at * (2 * NUM_HEADS) + heads
                part_largest = tl.load(stat, mask=head_ok, other=float("-inf"))
                part_total = tl.load(stat + NUM_HEADS, mask=head_ok, other=0.0)
                part_acc = tl.load(
                    part_out_ptr + (at * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :], mask=ok, other=0.0
                )
                new_largest = tl.maximum(largest, part_largest)
                base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
                fade = tl.exp2(largest - base)
                weight = tl.exp2(part_largest - base)
                total = total * fade + part_total * weight
                acc = acc * fade[:, None] + part_acc * weight[:, None]
                largest = new_largest
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(
                out_ptr + (out_token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=ok,
            )


@triton.jit
def kv_write_kernel(
    key_ptr,  # [T, KV, D] by the stride of a token
    value_ptr,
    cache_ptr,  # [2, N, S, KV, D]
    slot_mapping_ptr,  # [T] int64
    value_offset,
    stride_key,
    stride_value,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    """Store one token's keys and values at its slot; a negative slot stores nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        at = tl.arange(0, PADDED_WIDTH)
        ok = at < WIDTH
        key = tl.load(key_ptr + token * stride_key + at, mask=ok)
        value = tl.load(value_ptr + token * stride_value + at, mask=ok)
        to = cache_ptr + slot * WIDTH + at
        tl.store(to, key.to(cache_ptr.dtype.element_ty), mask=ok)
        tl.store(to + value_offset, value.to(cache_ptr.dtype.element_ty), mask=ok)
