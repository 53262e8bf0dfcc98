// The inner loops of attention: scores of rows against groups of keys, softmax of a chunk, weighted sums of values. What is
// computed in which order is said in attention.cpp; here is only how a machine does it fast.
//
// Rows come in blocks of up to ROWS: a micro-kernel keeps all its sums in registers, and each load of a key or a value
// serves every row of the block. PIECE groups of keys or values stay in the first cache while the blocks of a tile pass.
#pragma once

#include "kv.h"

namespace allm {

constexpr int CHUNK = 256;
constexpr int GROUPS = CHUNK / GROUP;
constexpr int PIECE = 4;  // groups
constexpr int ROWS = NUM_REGISTERS == 32 ? 6 : W == 8 ? 6 : 3;
constexpr int SCORE_SUMS = NUM_REGISTERS == 32 ? 24 : 12;  // accumulators of the score micro-kernel
constexpr float EMPTY = -INFINITY;

// How many groups ahead memory is prefetched.
template <class Kv>
constexpr int AHEAD = sizeof(typename Kv::Element) == 1 ? 8 : 4;

struct Range {
    int64_t begin, end;
};
ALLM_INLINE Range intersect(Range a, Range b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }

// One row's state: the greatest score, and the sum of the weights.
struct RowState {
    float top, total;
};

// body(integral_constant<R>) for R = count in 1 … ROWS
template <class Body>
ALLM_INLINE void with_rows(int count, Body&& body) {
    switch (count) {
        case 1: return body(std::integral_constant<int, 1>{});
        case 2: return body(std::integral_constant<int, 2>{});
        case 3: return body(std::integral_constant<int, 3>{});
        case 4: if constexpr (ROWS >= 4) return body(std::integral_constant<int, 4>{}); break;
        case 5: if constexpr (ROWS >= 5) return body(std::integral_constant<int, 5>{}); break;
        case 6: if constexpr (ROWS >= 6) return body(std::integral_constant<int, 6>{}); break;
    }
}

// ---- scores ------------------------------------------------------------------------------------------------------

// scores[r * CHUNK + n * 16 + lane] = query[r] . key of that token, for N groups of keys; query is [R][dim]. The lines of
// the groups at `ahead` are prefetched.
template <class Kv, int R, int N>
ALLM_NOINLINE void score(const float* query, int64_t dim, const uint8_t* const* keys, const uint8_t* const* ahead,
                         float* scores) {
    using Element = typename Kv::Element;
    constexpr int STEP = CACHE_LINE_BYTES / (GROUP * sizeof(Element));  // elements of the head dim in a line
    constexpr bool KEYS_FIRST = (R + 1) * N * PARTS + 1 <= NUM_REGISTERS;
    vf sum[R][N * PARTS];
    unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { unroll<N * PARTS>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][j] = zero(); }); });
    const Element* key[N];
    const uint8_t* next[N];
    unroll<N>([&](auto n) ALLM_LAMBDA_INLINE {
        key[n] = (const Element*)keys[n], next[n] = ahead[n];
        if constexpr (Kv::SCALED) __builtin_prefetch(scales_of(next[n]));
    });
    for (int64_t i = 0; i < dim; i++) {
        if (i % STEP == 0)
            unroll<N>([&](auto n) ALLM_LAMBDA_INLINE { __builtin_prefetch(next[n] + i * (GROUP * sizeof(Element))); });
        vf k[N * PARTS];
        if constexpr (KEYS_FIRST) {  // a query's element is loaded once for all groups
            unroll<N * PARTS>([&](auto j) ALLM_LAMBDA_INLINE {
                k[j] = Kv::load(key[j / PARTS] + i * GROUP + j % PARTS * W);
            });
            unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                vf q = broadcast(query[r * dim + i]);
                unroll<N * PARTS>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][j] = fma(q, k[j], sum[r][j]); });
            });
            forget_memory();
        } else {
            unroll<N>([&](auto n) ALLM_LAMBDA_INLINE {
                unroll<PARTS>([&](auto j) ALLM_LAMBDA_INLINE { k[j] = Kv::load(key[n] + i * GROUP + j * W); });
                unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                    vf q = broadcast(query[r * dim + i]);
                    unroll<PARTS>([&](auto j) ALLM_LAMBDA_INLINE {
                        sum[r][n * PARTS + j] = fma(q, k[j], sum[r][n * PARTS + j]);
                    });
                });
                forget_memory();
            });
        }
    }
    unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
        unroll<N * PARTS>([&](auto j) ALLM_LAMBDA_INLINE { store(scores + r * CHUNK + j * W, sum[r][j]); });
    });
}

template <class Kv, int R>
void score_groups(const float* query, int64_t dim, const uint8_t* const* keys, const uint8_t* const* ahead, int64_t count,
                  float* scores) {
    constexpr int N = smaller(PIECE, larger(1, SCORE_SUMS / (R * PARTS)));
    int64_t g = 0;
    for (; g + N <= count; g += N) score<Kv, R, N>(query, dim, keys + g, ahead + g, scores + g * GROUP);
    if constexpr (N > 2)
        for (; g + 2 <= count; g += 2) score<Kv, R, 2>(query, dim, keys + g, ahead + g, scores + g * GROUP);
    if constexpr (N > 1)
        for (; g < count; g++) score<Kv, R, 1>(query, dim, keys + g, ahead + g, scores + g * GROUP);
}

// ---- softmax -----------------------------------------------------------------------------------------------------

// The groups of a chunk that a tile reads: their keys, then their values, then what is read after them.
struct Uses {
    int64_t first, count;            // groups of the chunk
    const uint8_t* at[3 * GROUPS];   // keys of the first …, values of the first …, what comes next
    int32_t filled[GROUPS];          // tokens that a group holds: 16, or fewer where it has a hole
    const uint8_t* const* keys() const { return at; }
    const uint8_t* const* values() const { return at + count; }
};

// What one row sees of a chunk: tokens [inside.begin, inside.end) among the groups [groups.begin, groups.end).
struct Sight {
    Range groups, inside;
    const Uses& uses;

    bool whole(int64_t g) const {
        return g * GROUP >= inside.begin && (g + 1) * GROUP <= inside.end && uses.filled[g - uses.first] == GROUP;
    }
    vi counts(int64_t g, int part) const {  // lanes of a part of a group
        vi lane = lane_index() + part * W, token = lane + (int32_t)(g * GROUP);
        return (token >= (int32_t)inside.begin) & (token < (int32_t)inside.end) & (lane < uses.filled[g - uses.first]);
    }
};

// Finish the scores of a row: times the scales of the keys where they have some, -inf where the row does not see; returns
// the greatest.
template <class Kv>
float finish_scores(float* scores, const Sight& sight) {
    Lanes top = lanes(EMPTY);
    for (int64_t g = sight.groups.begin; g < sight.groups.end; g++) {
        const bool whole = sight.whole(g);
        for (int part = 0; part < PARTS; part++) {
            float* at = scores + g * GROUP + part * W;
            vf s = load(at);
            if constexpr (Kv::SCALED) s = s * load(scales_of(sight.uses.keys()[g - sight.uses.first]) + part * W);
            if (!whole) s = where(sight.counts(g, part), s, broadcast(EMPTY));
            if (Kv::SCALED || !whole) store(at, s);
            top.part[part] = max(top.part[part], s);
        }
    }
    return max(top);
}

// scores -> weights exp(score - top), times the scales of the values where they have some; returns the sum of the weights.
// All are 0 where every score is -inf, as for a row that sees nothing of this chunk.
template <class Kv>
float soften(float* scores, float top, const Sight& sight) {
    const vf shift = broadcast(top == EMPTY ? 0.0f : top);
    Lanes total = lanes(0.0f);
    for (int64_t g = sight.groups.begin; g < sight.groups.end; g++) {
        for (int part = 0; part < PARTS; part++) {
            float* at = scores + g * GROUP + part * W;
            vf weight = exp_or_zero(load(at) - shift);
            total.part[part] += weight;
            if constexpr (Kv::SCALED) {
                weight = weight * load(scales_of(sight.uses.values()[g - sight.uses.first]) + part * W);
                if (!sight.whole(g)) weight = where(sight.counts(g, part), weight, zero());
            }
            store(at, weight);
        }
    }
    return sum(total);
}

// ---- weighted sums of values -------------------------------------------------------------------------------------

// values[r * value_stride + column …] += sum over `count` tokens of weights[r * CHUNK + t] * value[t], N vectors from
// `column` on; group g of 16 tokens is at groups[g].
template <class Kv, int R, int N>
ALLM_NOINLINE void weigh(const float* weights, const uint8_t* const* groups, const uint8_t* const* ahead, int64_t column,
                         int64_t value_stride, int64_t count, float* values) {
    using Element = typename Kv::Element;
    constexpr bool WEIGHTS_FIRST = R < N;
    vf sum[R][N];
    auto for_each_sum = [&](auto&& body) ALLM_LAMBDA_INLINE {
        unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { unroll<N>([&](auto j) ALLM_LAMBDA_INLINE { body(r, j); }); });
    };
    float* at = values + column;
    for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { sum[r][j] = load(at + r * value_stride + j * W); });
    for (; count > 0; count -= GROUP, groups++, ahead++, weights += GROUP) {
        const Element* value = (const Element*)groups[0] + column;
        const Element* next = (const Element*)ahead[0] + column;
        const int64_t tokens = smaller<int64_t>(GROUP, count);
#pragma GCC unroll 1
        for (int64_t t = 0; t < tokens; t++, value += value_stride, next += value_stride) {
            unroll<N>([&](auto j) ALLM_LAMBDA_INLINE {
                if constexpr (j * W * sizeof(Element) % CACHE_LINE_BYTES == 0) __builtin_prefetch(next + j * W);
            });
            if constexpr (WEIGHTS_FIRST) {
                vf p[R];
                unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { p[r] = broadcast(weights[r * CHUNK + t]); });
                unroll<N>([&](auto j) ALLM_LAMBDA_INLINE {
                    vf v = Kv::load(value + j * W);
                    unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { sum[r][j] = fma(p[r], v, sum[r][j]); });
                });
            } else {
                vf v[N];
                unroll<N>([&](auto j) ALLM_LAMBDA_INLINE { v[j] = Kv::load(value + j * W); });
                unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                    vf p = broadcast(weights[r * CHUNK + t]);
                    unroll<N>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][j] = fma(p, v[j], sum[r][j]); });
                });
            }
        }
    }
    for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { store(at + r * value_stride + j * W, sum[r][j]); });
}

template <class Kv, int R>
void weigh_groups(const float* weights, const uint8_t* const* groups, const uint8_t* const* ahead, int64_t value_stride,
                  int64_t count, float* values) {
    // sums, the fewer of weights and values, one of the others, and one more where clang converts: it spills otherwise
#if defined(__clang__)
    constexpr int MORE = std::is_same<Kv, KvF32>::value ? 1 : 2;
#else
    constexpr int MORE = 1;
#endif
    constexpr int N = 4 * R + smaller(4, R) + MORE <= NUM_REGISTERS ? 4 : 2 * R + smaller(2, R) + 1 <= NUM_REGISTERS ? 2 : 1;
    int64_t j = 0;
    for (; j + N * W <= value_stride; j += N * W) weigh<Kv, R, N>(weights, groups, ahead, j, value_stride, count, values);
    if constexpr (N > 1)
        for (; j < value_stride; j += W) weigh<Kv, R, 1>(weights, groups, ahead, j, value_stride, count, values);
}

}  // namespace allm
