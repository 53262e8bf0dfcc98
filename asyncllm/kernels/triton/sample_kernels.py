"""The device code that draws one token per row of logits: no sort, no read by the host, no row depends on others.

What is drawn is what :mod:`asyncllm.sampling.sampler` draws: temperature, top-k, top-p of what is left, min-p, then the
inverse of the cumulative distribution at the row's number; in the order of the vocabulary where nothing has to be
ranked, else the greatest logit first and the lower id of equals first.

A ranking is never made. Every filter keeps a beginning of it, and a token is a place in it, so each is a *search* for
the logit at which a *level*, the count or the mass of the tokens that are at least as likely, reaches a number. Logits
are compared as integers of the same order (keys), so that a search ends; each pass over the row measures the levels at
three keys, and as soon as few enough tokens are left they are copied and the passes are over those. Masses are float64
sums of float32 weights, in an order that only the size of the vocabulary decides.

    keys        low          high
    ---- kept out ---|-- cut --|---------- kept ----------| the greatest
                     count(low) = tokens from ``low`` on, count(high) = from ``high`` on; the level of low reaches what
                     is wanted, that of high does not; in the end the cut holds one token, or tokens of one key

One program draws one row. Rows without temperature leave after the first pass.
"""

# Kernels are read by Triton's compiler, not called by Python.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["draw_kernel"]

LOWEST_KEY = tl.constexpr(-0x80000000)  # pyright: ignore[reportCallIssue]
NAN_KEY = tl.constexpr(0x7FFFFFFF)  # pyright: ignore[reportCallIssue]


@triton.jit
def key_of(x):
    """Return integers in the order of float32 ``x``; both zeros are one, NaN is the greatest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def scaled(values, columns, count, temperature):
    """Return ``values`` at ``columns`` over the temperature; -inf beyond ``count``."""
    return tl.div_rn(tl.load(values + columns, mask=columns < count, other=float("-inf")), temperature)


@triton.jit
def weigh(x, top, least):
    """Return the probabilities of scaled logits over that of the greatest, ``top``; 0 if less than ``least``."""
    weights = tl.exp(x - top)
    return tl.where(weights >= least, weights, 0.0).to(tl.float64)


@triton.jit
def neighbour(x, step: tl.constexpr):
    """Return the next float64 after ``x`` >= 0 (``step`` 1), or before ``x`` > 0 (-1)."""
    return (x.to(tl.int64, bitcast=True) + step).to(tl.float64, bitcast=True)


@triton.jit
def target_of(number, total):
    """Return what a cumulative sum must exceed: less than ``total``, whatever rounding says."""
    return tl.minimum(number * total, neighbour(total, -1))


@triton.jit
def greatest(logits, count, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Return the column of the first greatest logit."""
    offsets = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full([DEPTH, LANES], LOWEST_KEY, tl.int32)
    best_columns = tl.zeros([DEPTH, LANES], tl.int32)
    for first in range(0, count, DEPTH * LANES):
        columns = first + offsets
        keys = key_of(tl.load(logits + columns, mask=columns < count, other=float("-inf")))
        keys = tl.where(columns < count, keys, LOWEST_KEY)
        best_columns = tl.where(keys > best, columns, best_columns)
        best = tl.maximum(keys, best)
    is_best = best == tl.max(tl.max(best, 1), 0)
    return tl.min(tl.min(tl.where(is_best, best_columns, count), 1), 0)


@triton.jit
def measure(values, count, temperature, top, least, key1, key2, key3, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Return count and mass of the tokens whose key is at least ``key1``, and so for the others."""
    offsets = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    count1 = tl.zeros([LANES], tl.int32)
    count2 = tl.zeros([LANES], tl.int32)
    count3 = tl.zeros([LANES], tl.int32)
    mass1 = tl.zeros([LANES], tl.float64)
    mass2 = tl.zeros([LANES], tl.float64)
    mass3 = tl.zeros([LANES], tl.float64)
    for first in range(0, count, DEPTH * LANES):
        columns = first + offsets
        x = scaled(values, columns, count, temperature)
        weights = weigh(x, top, least)
        keys = tl.where(columns < count, key_of(x), LOWEST_KEY)
        count1 += tl.sum((keys >= key1).to(tl.int32), 0)
        count2 += tl.sum((keys >= key2).to(tl.int32), 0)
        count3 += tl.sum((keys >= key3).to(tl.int32), 0)
        mass1 += tl.sum(tl.where(keys >= key1, weights, 0.0), 0)
        mass2 += tl.sum(tl.where(keys >= key2, weights, 0.0), 0)
        mass3 += tl.sum(tl.where(keys >= key3, weights, 0.0), 0)
    return tl.sum(count1), tl.sum(mass1), tl.sum(count2), tl.sum(mass2), tl.sum(count3), tl.sum(mass3)


@triton.jit
def narrow(low, low_count, low_mass, high, high_count, high_mass, key, count, mass, wanted, by_count):
    """Return the cut with ``key`` as its new end, on the side where it belongs; ``key`` is in it."""
    reached = tl.where(by_count, count.to(tl.float64), mass) >= wanted
    inside = (key > low) & (key < high)
    up, down = inside & reached, inside & (reached == 0)
    low, low_count, low_mass = tl.where(up, key, low), tl.where(up, count, low_count), tl.where(up, mass, low_mass)
    high = tl.where(down, key, high)
    return low, low_count, low_mass, high, tl.where(down, count, high_count), tl.where(down, mass, high_mass)


@triton.jit
def search(
    values,
    count,
    temperature,
    top,
    least,
    wanted,
    by_count,
    enough,
    low,
    low_count,
    low_mass,
    high,
    high_count,
    high_mass,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the cut narrowed to one key or one token, or until no more than ``enough`` tokens are from ``low`` on."""
    while (high - low > 1) & (low_count - high_count > 1) & (low_count > enough):
        key2 = low + (high - low) // 2
        key1 = low + (key2 - low) // 2
        key3 = key2 + (high - key2) // 2
        count1, mass1, count2, mass2, count3, mass3 = measure(
            values,
            count,
            temperature,
            top,
            least,
            key1.to(tl.int32),
            key2.to(tl.int32),
            key3.to(tl.int32),
            LANES,
            DEPTH,
        )
        low, low_count, low_mass, high, high_count, high_mass = narrow(
            low, low_count, low_mass, high, high_count, high_mass, key2, count2, mass2, wanted, by_count
        )
        low, low_count, low_mass, high, high_count, high_mass = narrow(
            low, low_count, low_mass, high, high_count, high_mass, key1, count1, mass1, wanted, by_count
        )
        low, low_count, low_mass, high, high_count, high_mass = narrow(
            low, low_count, low_mass, high, high_count, high_mass, key3, count3, mass3, wanted, by_count
        )
    return low, low_count, low_mass, high, high_count, high_mass


@triton.jit
def copy_from(low, values, count, temperature, to_values, to_columns, TILE: tl.constexpr):
    """Copy the scaled logits whose key is at least ``low``, and their columns, in their order."""
    copied = tl.zeros([], tl.int32)
    for first in range(0, count, TILE):
        columns = first + tl.arange(0, TILE)
        x = scaled(values, columns, count, temperature)
        wanted = (key_of(x) >= low) & (columns < count)
        places = copied + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(to_values + places, x, mask=wanted)
        tl.store(to_columns + places, columns, mask=wanted)
        copied += tl.sum(wanted.to(tl.int32))
    tl.debug_barrier()  # other threads of this program read them


@triton.jit
def find(values, count, temperature, low, high, nth, TILE: tl.constexpr):
    """Return the column of the ``nth`` (from 0) logit with ``low`` <= key < ``high``."""
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    found = tl.zeros([], tl.int32)
    going = first == 0
    while going:
        columns = first + tl.arange(0, TILE)
        keys = key_of(scaled(values, columns, count, temperature))
        hits = ((keys >= low) & (keys < high) & (columns < count)).to(tl.int32)
        places = before + tl.cumsum(hits, 0)
        found = tl.min(tl.where((hits > 0) & (places == nth + 1), columns, count))
        before += tl.sum(hits)
        first += TILE
        going = (found == count) & (first < count)
    return tl.minimum(found, count - 1)


@triton.jit
def draw_by_id(logits, count, temperature, top, least, number, TILE: tl.constexpr):
    """Return a token drawn in the order of the vocabulary."""
    total = number * 0.0
    for first in range(0, count, TILE):
        total += tl.sum(weigh(scaled(logits, first + tl.arange(0, TILE), count, temperature), top, least))
    target = target_of(number, total)
    before = number * 0.0
    start = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int32)
    going = start == 0
    while going:
        columns = start + tl.arange(0, TILE)
        weights = weigh(scaled(logits, columns, count, temperature), top, least)
        mass = tl.sum(weights)
        going = (before + mass <= target) & (start + TILE < count)
        if going:
            before += mass
        else:
            beyond = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
            last = tl.max(tl.where(weights > 0.0, columns, 0))  # should rounding leave none beyond the target
            token = tl.minimum(tl.min(tl.where(beyond, columns, count)), last)
        start += TILE
    return token


@triton.jit
def draw_by_rank(
    logits,
    count,
    temperature,
    top,
    top_k,
    top_p,
    least,
    number,
    to_values,
    to_columns,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a token drawn among those that top-k, top-p and min-p leave."""
    values = logits
    by_count = top_k > 0
    highest = key_of(top).to(tl.int64) + 1

    # All tokens, and two guesses of where the cut may be.
    key2, key3 = key_of(top - 12.0), key_of(top - 4.0)
    low_count, total, count2, mass2, count3, mass3 = measure(
        values, count, temperature, top, 0.0, LOWEST_KEY + 1, key2, key3, LANES, DEPTH
    )
    low, low_mass = highest * 0 + LOWEST_KEY + 1, total
    high, high_count, high_mass = highest, low_count * 0, total * 0.0
    wanted = tl.where(by_count, top_k.to(tl.float64), total * top_p)
    low, low_count, low_mass, high, high_count, high_mass = narrow(
        low, low_count, low_mass, high, high_count, high_mass, key2.to(tl.int64), count2, mass2, wanted, by_count
    )
    low, low_count, low_mass, high, high_count, high_mass = narrow(
        low, low_count, low_mass, high, high_count, high_mass, key3.to(tl.int64), count3, mass3, wanted, by_count
    )
    low, low_count, low_mass, high, high_count, high_mass = search(
        values,
        count,
        temperature,
        top,
        0.0,
        wanted,
        by_count,
        DEPTH * LANES,
        low,
        low_count,
        low_mass,
        high,
        high_count,
        high_mass,
        LANES,
        DEPTH,
    )
    copied = (low_count <= DEPTH * LANES) & (count > DEPTH * LANES)
    if copied:
        copy_from(low, values, count, temperature, to_values, to_columns, DEPTH * LANES)
        values, count, temperature = to_values, low_count, temperature * 0.0 + 1.0

    # Top-k, or top-p where there is no top-k: what it keeps is all above the cut, and the first ``kept`` in it.
    low, low_count, low_mass, high, high_count, high_mass = search(
        values,
        count,
        temperature,
        top,
        0.0,
        wanted,
        by_count,
        0,
        low,
        low_count,
        low_mass,
        high,
        high_count,
        high_mass,
        LANES,
        DEPTH,
    )
    kept = kept_in_cut(wanted, by_count, low_count, low_mass, high_count, high_mass)

    # Top-p of what top-k has left.
    if by_count & (top_p < 1.0):
        wanted = (high_mass + kept * each(low_count, low_mass, high_count, high_mass)) * top_p
        if wanted <= high_mass:
            low, low_count, low_mass, high, high_count, high_mass = search(
                values,
                count,
                temperature,
                top,
                0.0,
                wanted,
                by_count == 0,
                0,
                high,
                high_count,
                high_mass,
                highest,
                high_count * 0,
                high_mass * 0.0,
                LANES,
                DEPTH,
            )
            kept = low_count - high_count
        kept = tl.minimum(kept, kept_in_cut(wanted, by_count == 0, low_count, low_mass, high_count, high_mass))

    # Min-p, and the draw.
    if least > 0.0:
        low_count, low_mass, high_count, high_mass, _, _ = measure(
            values, count, temperature, top, least, low.to(tl.int32), high.to(tl.int32), high.to(tl.int32), LANES, DEPTH
        )
    weight = each(low_count, low_mass, high_count, high_mass)
    target = target_of(number, high_mass + kept * weight)
    if target < high_mass:
        low, low_count, low_mass, high, high_count, high_mass = search(
            values,
            count,
            temperature,
            top,
            least,
            neighbour(target, 1),
            top_k < 0,  # never
            0,
            high,
            high_count,
            high_mass,
            highest,
            high_count * 0,
            high_mass * 0.0,
            LANES,
            DEPTH,
        )
        weight = each(low_count, low_mass, high_count, high_mass)
        kept = low_count - high_count
    nth = tl.minimum((target - high_mass) / tl.maximum(weight, 1e-300), (kept - 1).to(tl.float64))
    place = find(values, count, temperature, low, high, tl.maximum(nth, 0.0).to(tl.int32), DEPTH * LANES)
    return tl.where(copied, tl.load(to_columns + place, mask=copied, other=0), place)


@triton.jit
def each(low_count, low_mass, high_count, high_mass):
    """Return the mass of each token of a cut that holds one token, or tokens of one key."""
    return (low_mass - high_mass) / tl.maximum(low_count - high_count, 1).to(tl.float64)


@triton.jit
def kept_in_cut(wanted, by_count, low_count, low_mass, high_count, high_mass):
    """Return how many tokens of the cut it takes for the level to reach ``wanted``."""
    missing = tl.where(by_count, wanted - high_count.to(tl.float64), wanted - high_mass)
    one = tl.where(by_count, high_mass * 0.0 + 1.0, each(low_count, low_mass, high_count, high_mass))
    inside = low_count - high_count
    taken = tl.minimum(missing / tl.maximum(one, 1e-300), inside.to(tl.float64))
    whole = taken.to(tl.int32)
    return tl.maximum(whole + (whole < taken).to(tl.int32), 1)


@triton.jit
def draw_kernel(
    ids_ptr,
    best_ptr,
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    number_ptr,
    copied_values_ptr,
    copied_columns_ptr,
    vocabulary,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    number_stride,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Draw the token of row ``program_id(0)``."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * logits_stride
    token = greatest(logits, vocabulary, LANES, DEPTH)
    best = tl.load(logits + token)
    tl.store(best_ptr + row, best)
    temperature = tl.load(temperature_ptr + row * temperature_stride)
    is_random = temperature > 0.0
    temperature = tl.where(is_random, temperature, 1.0)
    top = tl.div_rn(best, temperature)
    # Also where the division overflows: all others are infinitely less likely.
    if is_random & (tl.abs(top) < float("inf")):
        top_k = tl.load(top_k_ptr + row * top_k_stride)
        top_k = tl.where(top_k < vocabulary, top_k, 0)
        top_p = tl.load(top_p_ptr + row * top_p_stride)
        least = tl.load(min_p_ptr + row * min_p_stride)
        number = tl.load(number_ptr + row * number_stride)
        if (top_k > 0) | (top_p < 1.0):
            token = draw_by_rank(
                logits,
                vocabulary,
                temperature,
                top,
                top_k,
                top_p.to(tl.float64),
                least,
                number,
                copied_values_ptr + row * (DEPTH * LANES),
                copied_columns_ptr + row * (DEPTH * LANES),
                LANES,
                DEPTH,
            )
        else:
            token = draw_by_id(logits, vocabulary, temperature, top, least, number, DEPTH * LANES)
    tl.store(ids_ptr + row, token.to(tl.int64))
