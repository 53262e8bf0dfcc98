// How weights lie in memory: panels.
//
// A weight of N x K is cut into panels of P = 2 W outputs ("low" columns 0 … W-1, "high" columns W … P-1); the last one is
// filled with zeros. Within a panel the weights of one k lie side by side, k after k: a micro-kernel streams a panel from
// front to back.
//
// A Format gives: BLOCK (k per block), BYTES (of one block of one panel), Scales and scales() (what a block shares), and
// weights(block, scales, i, low, high): the i-th k of the block. The value is what the format's definition says, rounded
// like a dequantization to fp32, so that results equal those of the dequantized weights bit for bit. get() is the value
// for one column. Here are the plain formats; the quantized ones are in formats_gguf.h.
#pragma once

#include "asyncllm_kernels.h"
#include "simd.h"

namespace allm {

constexpr int P = 2 * W;  // columns of a panel

struct NoScales {};

struct F32 {
    using Panel = F32;
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
    using Panel = BF16;
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
    using Panel = F16;
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

}  // namespace allm
