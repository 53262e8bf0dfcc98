// How weights lie in memory, and how two vectors of them become fp32.
//
// A weight of N x K is cut into panels of P = 2 W outputs ("low" columns 0 … W-1, "high" columns W … P-1); the last one is
// filled with zeros. Within a panel the weights of one k lie side by side, k after k: a micro-kernel streams a panel from
// front to back. The quantized formats keep the values, scales and minima of their GGUF blocks bit for bit, only in this
// order; a block is 32 k long, or 16. Where GGUF shares numbers among several of these, each block has them: with all that
// a block needs at its start, a kernel knows no second level. Numbers of 5 and 6 bits take a byte each.
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
    static constexpr int ID = ALLM_Q8_0, BLOCK = 32, BYTES = 2 * P + 32 * P, SOURCE_BLOCK = 32, SOURCE_BYTES = 34;
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
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
        memcpy(block + 2 * column, source, 2);
        for (int i = 0; i < 32; i++) block[2 * P + i * P + column] = source[2 + i];
    }
    static float get(const uint8_t* block, int i, int column) {
        return from_f16(((const uint16_t*)block)[column]) * (float)(int8_t)block[2 * P + i * P + column];
    }
};

// A byte holds one nibble of a low column (low bits) and one of its high column.
ALLM_INLINE void put_nibble(uint8_t* rows, int i, int column, int value) {
    int shift = column < W ? 0 : 4;
    uint8_t& byte = rows[i * W + column % W];
    byte = (uint8_t)((byte & (0xf0 >> shift)) | (value << shift));
}
ALLM_INLINE void put_nibbles(uint8_t* rows, int column, const uint8_t* source) {
    // GGUF: the first 16 values are the low nibbles, the last 16 the high ones
    for (int i = 0; i < 32; i++) put_nibble(rows, i, column, i < 16 ? source[i] & 15 : source[i - 16] >> 4);
}
ALLM_INLINE int get_nibble(const uint8_t* rows, int i, int column) {
    return (rows[i * W + column % W] >> (column < W ? 0 : 4)) & 15;
}

// [P] fp16 scales, then 32 x [W] bytes. value = d * (q - 8)
struct Q4_0 {
    static constexpr int ID = ALLM_Q4_0, BLOCK = 32, BYTES = 2 * P + 32 * W, SOURCE_BLOCK = 32, SOURCE_BYTES = 18;
    static constexpr bool QUANTIZED = true;
    using Scales = TwoScales;
    static ALLM_INLINE Scales scales(const uint8_t* block) { return Q8_0::scales(block); }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& d, int i, vf& low, vf& high) {
        load_nibbles(block + 2 * P + i * W, low, high);
        low = d.low * (low - broadcast(8.0f));
        high = d.high * (high - broadcast(8.0f));
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
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
    static constexpr int ID = ALLM_Q4_1, BLOCK = 32, BYTES = 4 * P + 32 * W, SOURCE_BLOCK = 32, SOURCE_BYTES = 20;
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
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
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

// What begins a block of Q4_K and Q5_K: [P] fp16 d, [P] fp16 m, [P] scales, [P] minima of 6 bits.
// value = (d * scale) * q - m * minimum, each product rounded.
struct SixBitScales {
    static constexpr int BYTES = 6 * P;
    static ALLM_INLINE ScalesAndMinima get(const uint8_t* block) {
        const uint16_t* d = (const uint16_t*)block;
        const int8_t* scale = (const int8_t*)block + 4 * P;
        return {load_f16(d) * load_i8(scale), load_f16(d + W) * load_i8(scale + W),
                -(load_f16(d + P) * load_i8(scale + P)), -(load_f16(d + P + W) * load_i8(scale + P + W))};
    }
    // source: the two factors, then 8 scales and 8 minima in 12 bytes
    static void put(uint8_t* block, int column, const uint8_t* source, int part) {
        memcpy(block + 2 * column, source, 2);
        memcpy(block + 2 * P + 2 * column, source + 2, 2);
        const uint8_t* s = source + 4;
        bool low = part < 4;
        block[4 * P + column] = (uint8_t)(low ? s[part] & 63 : (s[part + 4] & 15) | (s[part - 4] >> 6 << 4));
        block[5 * P + column] = (uint8_t)(low ? s[part + 4] & 63 : (s[part + 4] >> 4) | (s[part] >> 6 << 4));
    }
    static float value(const uint8_t* block, int column, int q) {
        const uint16_t* d = (const uint16_t*)block;
        float scaled = from_f16(d[column]) * (float)block[4 * P + column] * (float)q;
        return scaled - from_f16(d[P + column]) * (float)block[5 * P + column];
    }
};

// six-bit scales, then 32 x [W] bytes
struct Q4_K {
    static constexpr int ID = ALLM_Q4_K, BLOCK = 32, SOURCE_BLOCK = 256, SOURCE_BYTES = 144;
    static constexpr int HEAD = SixBitScales::BYTES, BYTES = HEAD + 32 * W;
    static constexpr bool QUANTIZED = true;
    using Scales = ScalesAndMinima;
    static ALLM_INLINE Scales scales(const uint8_t* block) { return SixBitScales::get(block); }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& s, int i, vf& low, vf& high) {
        load_nibbles(block + HEAD + i * W, low, high);
        low = s.low * low + s.min_low;
        high = s.high * high + s.min_high;
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        SixBitScales::put(block, column, source, part);
        const uint8_t* bytes = source + 16 + part / 2 * 32;  // the low halves are one part, the high halves the next
        for (int i = 0; i < 32; i++) put_nibble(block + HEAD, i, column, bytes[i] >> part % 2 * 4 & 15);
    }
    static float get(const uint8_t* block, int i, int column) {
        return SixBitScales::value(block, column, get_nibble(block + HEAD, i, column));
    }
};

// six-bit scales, then 32 x [P] bytes
struct Q5_K {
    static constexpr int ID = ALLM_Q5_K, BLOCK = 32, SOURCE_BLOCK = 256, SOURCE_BYTES = 176;
    static constexpr int HEAD = SixBitScales::BYTES, BYTES = HEAD + 32 * P;
    static constexpr bool QUANTIZED = true;
    using Scales = ScalesAndMinima;
    static ALLM_INLINE Scales scales(const uint8_t* block) { return SixBitScales::get(block); }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& s, int i, vf& low, vf& high) {
        const int8_t* q = (const int8_t*)block + HEAD + i * P;
        low = s.low * load_i8(q) + s.min_low;
        high = s.high * load_i8(q + W) + s.min_high;
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        SixBitScales::put(block, column, source, part);
        const uint8_t *fifth = source + 16, *bytes = source + 48 + part / 2 * 32;
        for (int i = 0; i < 32; i++)
            block[HEAD + i * P + column] = (uint8_t)((bytes[i] >> part % 2 * 4 & 15) | (fifth[i] >> part & 1) << 4);
    }
    static float get(const uint8_t* block, int i, int column) {
        return SixBitScales::value(block, column, block[HEAD + i * P + column]);
    }
};

// [P] fp16 d, [P] int8 scales, then 16 x [P] int8. value = (d * scale) * q
struct Q6_K {
    static constexpr int ID = ALLM_Q6_K, BLOCK = 16, SOURCE_BLOCK = 256, SOURCE_BYTES = 210;
    static constexpr int HEAD = 3 * P, BYTES = HEAD + 16 * P;
    static constexpr bool QUANTIZED = true;
    using Scales = TwoScales;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        const uint16_t* d = (const uint16_t*)block;
        const int8_t* scale = (const int8_t*)block + 2 * P;
        return {load_f16(d) * load_i8(scale), load_f16(d + W) * load_i8(scale + W)};
    }
    static ALLM_INLINE void weights(const uint8_t* block, const Scales& d, int i, vf& low, vf& high) {
        const int8_t* q = (const int8_t*)block + HEAD + i * P;
        low = d.low * load_i8(q);
        high = d.high * load_i8(q + W);
    }
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        memcpy(block + 2 * column, source + 208, 2);
        block[2 * P + column] = source[192 + part];
        const uint8_t *four = source + part / 8 * 64, *two = source + 128 + part / 8 * 32;  // of this half of the numbers
        for (int i = 0; i < 16; i++) {
            int n = part % 8 * 16 + i;
            int value = (four[n % 64] >> n / 64 * 4 & 15) | (two[n % 32] >> n / 32 * 2 & 3) << 4;
            block[HEAD + i * P + column] = (uint8_t)(value - 32);
        }
    }
    static float get(const uint8_t* block, int i, int column) {
        float scale = from_f16(((const uint16_t*)block)[column]) * (float)(int8_t)block[2 * P + column];
        return scale * (float)(int8_t)block[HEAD + i * P + column];
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
        case ALLM_Q4_K: body(Q4_K{}); return true;
        case ALLM_Q5_K: body(Q5_K{}); return true;
        case ALLM_Q6_K: body(Q6_K{}); return true;
        default: return false;
    }
}

// How many k come together in a source: what K must be a multiple of.
template <class Format>
constexpr int source_block() {
    if constexpr (Format::QUANTIZED) return Format::SOURCE_BLOCK;
    else return 1;
}

template <class Format>
ALLM_INLINE int64_t panel_bytes(int64_t k) {
    return k / Format::BLOCK * Format::BYTES;
}

}  // namespace allm
