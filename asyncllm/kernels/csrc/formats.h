// How weights lie in memory, and how two vectors of them become fp32.
//
// A weight of N x K is cut into panels of P = 2 W outputs ("low" columns 0 … W-1, "high" columns W … P-1); the last one is
// filled with zeros. Within a panel the weights of one k lie side by side, k after k: a micro-kernel streams a panel from
// front to back. The quantized formats keep the values, scales and minima of their GGUF blocks bit for bit, only in this
// order; a block is 32 k long.
//
// A Format gives: BLOCK (k per block), BYTES (of one block of one panel), Scales and scales() (what a block shares), and
// weights(block, scales, i, low, high): the i-th k of the block. The value is what the format's definition says, rounded
// like a dequantization to fp32, so that results equal those of the dequantized weights bit for bit.
#pragma once

#include "asyncllm_kernels.h"
#include "simd.h"

namespace allm {

constexpr int P = 2 * W;  // columns of a panel

struct NoScales {};

struct F32 {
    static constexpr int ID = ALLM_F32, BLOCK = 1, BYTES = 4 * P;
    static constexpr bool QUANTIZED = false;
    using Scales = NoScales;
    static ALLM_INLINE Scales scales(const uint8_t*) { return {}; }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales&, int, vf& low, vf& high) {
        low = load((const float*)block);
        high = load((const float*)block + W);
    }
    static void put(uint8_t* block, int, int column, float value) { ((float*)block)[column] = value; }
    static float get(const uint8_t* block, int, int column) { return ((const float*)block)[column]; }
};

// The two halves are interleaved (low 16 bits of a word: low column), so that one load and two cheap operations give both.
struct BF16 {
    static constexpr int ID = ALLM_BF16, BLOCK = 1, BYTES = 2 * P;
    static constexpr bool QUANTIZED = false;
    using Scales = NoScales;
    static ALLM_INLINE Scales scales(const uint8_t*) { return {}; }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales&, int, vf& low, vf& high) {
        vi pair = (vi)load((const float*)block);
        low = (vf)(pair << 16);
        high = (vf)(pair & (int32_t)0xffff0000);
    }
    static ALLM_INLINE int place(int column) { return column < W ? 2 * column : 2 * (column - W) + 1; }
    static void put(uint8_t* block, int, int column, float value) { ((uint16_t*)block)[place(column)] = to_bf16(value); }
    static float get(const uint8_t* block, int, int column) { return from_bf16(((const uint16_t*)block)[place(column)]); }
};

struct F16 {
    static constexpr int ID = ALLM_F16, BLOCK = 1, BYTES = 2 * P;
    static constexpr bool QUANTIZED = false;
    using Scales = NoScales;
    static ALLM_INLINE Scales scales(const uint8_t*) { return {}; }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales&, int, vf& low, vf& high) {
        low = load_f16((const uint16_t*)block);
        high = load_f16((const uint16_t*)block + W);
    }
    static void put(uint8_t* block, int, int column, float value) { ((uint16_t*)block)[column] = to_f16(value); }
    static float get(const uint8_t* block, int, int column) { return from_f16(((const uint16_t*)block)[column]); }
};

struct TwoScales {
    vf low, high;
};

// [P] fp16 scales, then 32 x [P] int8. value = d * q
struct Q8_0 {
    static constexpr int ID = ALLM_Q8_0, BLOCK = 32, BYTES = 2 * P + 32 * P, SOURCE_BYTES = 34;
    static constexpr bool QUANTIZED = true;
    using Scales = TwoScales;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        return {load_f16((const uint16_t*)block), load_f16((const uint16_t*)block + W)};
    }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& d, int i, vf& low, vf& high) {
        const int8_t* q = (const int8_t*)block + 2 * P + i * P;
        low = d.low * load_i8(q);
        high = d.high * load_i8(q + W);
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source) {
        memcpy(block + 2 * column, source, 2);
        for (int i = 0; i < 32; i++) block[2 * P + i * P + column] = source[2 + i];
    }
    static float get(const uint8_t* block, int i, int column) {
        return from_f16(((const uint16_t*)block)[column]) * (float)(int8_t)block[2 * P + i * P + column];
    }
};

// A byte holds one nibble of a low column (low bits) and one of its high column.
ALLM_INLINE void put_nibbles(uint8_t* rows, int column, const uint8_t* source) {
    int byte = column % W, shift = column < W ? 0 : 4;
    for (int i = 0; i < 32; i++) {  // GGUF: the first 16 values are the low nibbles, the last 16 the high ones
        int value = i < 16 ? source[i] & 15 : source[i - 16] >> 4;
        rows[i * W + byte] = (uint8_t)((rows[i * W + byte] & (0xf0 >> shift)) | (value << shift));
    }
}
ALLM_INLINE int get_nibble(const uint8_t* rows, int i, int column) {
    return (rows[i * W + column % W] >> (column < W ? 0 : 4)) & 15;
}

// [P] fp16 scales, then 32 x [W] bytes. value = d * (q - 8)
struct Q4_0 {
    static constexpr int ID = ALLM_Q4_0, BLOCK = 32, BYTES = 2 * P + 32 * W, SOURCE_BYTES = 18;
    static constexpr bool QUANTIZED = true;
    using Scales = TwoScales;
    static ALLM_INLINE Scales scales(const uint8_t* block) { return Q8_0::scales(block); }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& d, int i, vf& low, vf& high) {
        load_nibbles(block + 2 * P + i * W, low, high);
        low = d.low * (low - broadcast(8.0f));
        high = d.high * (high - broadcast(8.0f));
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source) {
        memcpy(block + 2 * column, source, 2);
        put_nibbles(block + 2 * P, column, source + 2);
    }
    static float get(const uint8_t* block, int i, int column) {
        return from_f16(((const uint16_t*)block)[column]) * (float)(get_nibble(block + 2 * P, i, column) - 8);
    }
};

struct ScalesAndMinima {
    vf low, high, min_low, min_high;
};

// [P] fp16 scales, [P] fp16 minima, then 32 x [W] bytes. value = d * q + m, rounded twice
struct Q4_1 {
    static constexpr int ID = ALLM_Q4_1, BLOCK = 32, BYTES = 4 * P + 32 * W, SOURCE_BYTES = 20;
    static constexpr bool QUANTIZED = true;
    using Scales = ScalesAndMinima;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        const uint16_t* d = (const uint16_t*)block;
        return {load_f16(d), load_f16(d + W), load_f16(d + P), load_f16(d + P + W)};
    }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& s, int i, vf& low, vf& high) {
        load_nibbles(block + 4 * P + i * W, low, high);
        low = s.low * low + s.min_low;
        high = s.high * high + s.min_high;
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source) {
        memcpy(block + 2 * column, source, 2);
        memcpy(block + 2 * P + 2 * column, source + 2, 2);
        put_nibbles(block + 4 * P, column, source + 4);
    }
    static float get(const uint8_t* block, int i, int column) {
        const uint16_t* d = (const uint16_t*)block;
        float scaled = from_f16(d[column]) * (float)get_nibble(block + 4 * P, i, column);
        return scaled + from_f16(d[P + column]);
    }
};

// Call body(Format{}) with the format of this id; false if there is none.
template <class Body>
ALLM_INLINE bool with_format(int32_t id, Body&& body) {
    switch (id) {
        case ALLM_F32: body(F32{}); return true;
        case ALLM_BF16: body(BF16{}); return true;
        case ALLM_F16: body(F16{}); return true;
        case ALLM_Q8_0: body(Q8_0{}); return true;
        case ALLM_Q4_0: body(Q4_0{}); return true;
        case ALLM_Q4_1: body(Q4_1{}); return true;
        default: return false;
    }
}

template <class Format>
ALLM_INLINE int64_t panel_bytes(int64_t k) {
    return k / Format::BLOCK * Format::BYTES;
}

}  // namespace allm
