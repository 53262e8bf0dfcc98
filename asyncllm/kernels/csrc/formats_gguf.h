// The quantized formats of GGUF as panels (formats.h says what a panel is), with the values of their blocks bit for bit.
//
// A block of a panel is 32 k, or 16: first the factors that its numbers share, for all columns, then the numbers, k after
// k. Where GGUF shares factors among several of these, each block has them: a kernel knows no second level. Numbers of 5
// and 6 bits take a byte each, those of 2 and 3 bits a nibble.
//
// Factors and Rows make Blocks, which kernels read; a format is Blocks and knows how to read its source (SOURCE_BLOCK values
// in SOURCE_BYTES): put_block(block, column, source, part) takes the part-th run of BLOCK values. For one column, number()
// is the i-th integer and value = factor * number + minimum, rounded after each of the two operations.
#pragma once

#include "panels.h"

namespace allm {

ALLM_INLINE float f16_at(const uint8_t* block, int index) { return from_f16(((const uint16_t*)block)[index]); }

struct TwoScales {
    vf low, high;
};
struct ScalesAndMinima {
    vf low, high, min_low, min_high;
};

// ---- factors -----------------------------------------------------------------------------------------------------

// [P] fp16 scales
struct F16Scales {
    static constexpr int HEAD = 2 * P;
    static constexpr bool MINIMA = false;
    using Scales = TwoScales;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        return {load_f16((const uint16_t*)block), load_f16((const uint16_t*)block + W)};
    }
    static float factor(const uint8_t* block, int column) { return f16_at(block, column); }
    static float minimum(const uint8_t*, int) { return 0.0f; }
    static void put_factors(uint8_t* block, int column, const uint8_t* scale) { memcpy(block + 2 * column, scale, 2); }
    static void put_line(uint8_t* block, int column, float scale, float) { ((uint16_t*)block)[column] = to_f16(scale); }
};

// [P] fp16 scales, [P] fp16 minima
struct F16ScalesAndMinima {
    static constexpr int HEAD = 4 * P;
    static constexpr bool MINIMA = true;
    using Scales = ScalesAndMinima;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        const uint16_t* d = (const uint16_t*)block;
        return {load_f16(d), load_f16(d + W), load_f16(d + P), load_f16(d + P + W)};
    }
    static float factor(const uint8_t* block, int column) { return f16_at(block, column); }
    static float minimum(const uint8_t* block, int column) { return f16_at(block, P + column); }
    static void put_factors(uint8_t* block, int column, const uint8_t* both) {
        memcpy(block + 2 * column, both, 2);
        memcpy(block + 2 * P + 2 * column, both + 2, 2);
    }
    static void put_line(uint8_t* block, int column, float scale, float minimum) {
        ((uint16_t*)block)[column] = to_f16(scale);
        ((uint16_t*)block)[P + column] = to_f16(minimum);
    }
};

// [P] fp16 d, [P] fp16 m, [P] scales and [P] minima of at most 6 bits. value = (d * scale) * q - m * minimum
struct SmallScalesAndMinima {
    static constexpr int HEAD = 6 * P;
    static constexpr bool MINIMA = true;
    using Scales = ScalesAndMinima;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        const uint16_t* d = (const uint16_t*)block;
        const int8_t* scale = (const int8_t*)block + 4 * P;
        return {load_f16(d) * load_i8(scale), load_f16(d + W) * load_i8(scale + W),
                -(load_f16(d + P) * load_i8(scale + P)), -(load_f16(d + P + W) * load_i8(scale + P + W))};
    }
    static float factor(const uint8_t* block, int column) {
        return f16_at(block, column) * (float)block[4 * P + column];
    }
    static float minimum(const uint8_t* block, int column) {
        return -(f16_at(block, P + column) * (float)block[5 * P + column]);
    }
    static void put_factors(uint8_t* block, int column, const uint8_t* both, int scale, int minimum) {
        F16ScalesAndMinima::put_factors(block, column, both);
        block[4 * P + column] = (uint8_t)scale;
        block[5 * P + column] = (uint8_t)minimum;
    }
    // Of Q4_K and Q5_K: the two factors, then 8 scales and 8 minima of 6 bits in 12 bytes.
    static void put_six_bits(uint8_t* block, int column, const uint8_t* source, int part) {
        const uint8_t* s = source + 4;
        if (part < 4) return put_factors(block, column, source, s[part] & 63, s[part + 4] & 63);
        put_factors(block, column, source, (s[part + 4] & 15) | (s[part - 4] >> 6 << 4), (s[part + 4] >> 4) | (s[part] >> 6 << 4));
    }
};

// [P] fp16 d, [P] int8 scales. value = (d * scale) * q
struct Int8Scales {
    static constexpr int HEAD = 3 * P;
    static constexpr bool MINIMA = false;
    using Scales = TwoScales;
    static ALLM_INLINE Scales scales(const uint8_t* block) {
        const uint16_t* d = (const uint16_t*)block;
        const int8_t* scale = (const int8_t*)block + 2 * P;
        return {load_f16(d) * load_i8(scale), load_f16(d + W) * load_i8(scale + W)};
    }
    static float factor(const uint8_t* block, int column) {
        return f16_at(block, column) * (float)(int8_t)block[2 * P + column];
    }
    static float minimum(const uint8_t*, int) { return 0.0f; }
    static void put_factors(uint8_t* block, int column, const uint8_t* d, int scale) {
        memcpy(block + 2 * column, d, 2);
        block[2 * P + column] = (uint8_t)scale;
    }
};

// ---- numbers -----------------------------------------------------------------------------------------------------

// [P] int8 for each k
struct Bytes {
    static constexpr int BITS = 8, OFFSET = 0, ROW = P;
    static ALLM_INLINE void load(const uint8_t* row, vf& low, vf& high) {
        low = load_i8((const int8_t*)row);
        high = load_i8((const int8_t*)row + W);
    }
    static void put(uint8_t* row, int column, int number) { row[column] = (uint8_t)number; }
    static int get(const uint8_t* row, int column) { return (int8_t)row[column]; }
};

// [W] bytes for each k: one nibble of a low column (low bits) and one of its high column, each the number plus OFFSET
template <int OFFSET_>
struct Nibbles {
    static constexpr int BITS = 4, OFFSET = OFFSET_, ROW = W;
    static ALLM_INLINE void load(const uint8_t* row, vf& low, vf& high) {
        load_nibbles(row, low, high);
        if constexpr (OFFSET != 0) {
            low -= broadcast(OFFSET);
            high -= broadcast(OFFSET);
        }
    }
    static void put(uint8_t* row, int column, int number) {
        int shift = column < W ? 0 : 4;
        uint8_t& byte = row[column % W];
        byte = (uint8_t)((byte & (0xf0 >> shift)) | (number + OFFSET) << shift);
    }
    static int get(const uint8_t* row, int column) { return (row[column % W] >> (column < W ? 0 : 4) & 15) - OFFSET; }
};

template <class Factors, class Rows, int BLOCK_>
struct Blocks : Factors, Rows {
    using Panel = Blocks;  // what kernels are made for: formats that look the same share them
    static constexpr bool QUANTIZED = true;
    static constexpr int BLOCK = BLOCK_, BYTES = Factors::HEAD + BLOCK * Rows::ROW;

    static ALLM_INLINE void weights(const uint8_t* block, const typename Factors::Scales& s, int i, vf& low, vf& high) {
        Rows::load(block + Factors::HEAD + i * Rows::ROW, low, high);
        low = s.low * low;
        high = s.high * high;
        if constexpr (Factors::MINIMA) {
            low += s.min_low;
            high += s.min_high;
        }
    }
    static void put_number(uint8_t* block, int i, int column, int number) {
        Rows::put(block + Factors::HEAD + i * Rows::ROW, column, number);
    }
    static void clear(uint8_t* block, int i, int column) { block[Factors::HEAD + i * Rows::ROW + column % W] = 0; }
    static int number(const uint8_t* block, int i, int column) {
        return Rows::get(block + Factors::HEAD + i * Rows::ROW, column);
    }
    static float get(const uint8_t* block, int i, int column) {
        float scaled = Factors::factor(block, column) * (float)number(block, i, column);
        return Factors::MINIMA ? scaled + Factors::minimum(block, column) : scaled;
    }
};

// ---- formats -----------------------------------------------------------------------------------------------------

// The i-th of 32 numbers of 4 bits: the first 16 in the low halves of 16 bytes, the others in the high ones.
ALLM_INLINE int nibble_of_32(const uint8_t* bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; }

struct Q8_0 : Blocks<F16Scales, Bytes, 32> {
    static constexpr int ID = ALLM_Q8_0, SOURCE_BLOCK = 32, SOURCE_BYTES = 34;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
        put_factors(block, column, source);
        for (int i = 0; i < 32; i++) put_number(block, i, column, source[2 + i]);
    }
};

struct Q4_0 : Blocks<F16Scales, Nibbles<8>, 32> {
    static constexpr int ID = ALLM_Q4_0, SOURCE_BLOCK = 32, SOURCE_BYTES = 18;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
        put_factors(block, column, source);
        for (int i = 0; i < 32; i++) put_number(block, i, column, nibble_of_32(source + 2, i) - 8);
    }
};

struct Q4_1 : Blocks<F16ScalesAndMinima, Nibbles<0>, 32> {
    static constexpr int ID = ALLM_Q4_1, SOURCE_BLOCK = 32, SOURCE_BYTES = 20;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
        put_factors(block, column, source);
        for (int i = 0; i < 32; i++) put_number(block, i, column, nibble_of_32(source + 4, i));
    }
};

// The i-th of 32 numbers of 5 bits: 32 fifth bits, then the lower four.
ALLM_INLINE int five_bits_of_32(const uint8_t* source, int i) {
    return nibble_of_32(source + 4, i) | (source[i / 8] >> i % 8 & 1) << 4;
}

struct Q5_0 : Blocks<F16Scales, Bytes, 32> {
    static constexpr int ID = ALLM_Q5_0, SOURCE_BLOCK = 32, SOURCE_BYTES = 22;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
        put_factors(block, column, source);
        for (int i = 0; i < 32; i++) put_number(block, i, column, five_bits_of_32(source + 2, i) - 16);
    }
};

struct Q5_1 : Blocks<F16ScalesAndMinima, Bytes, 32> {
    static constexpr int ID = ALLM_Q5_1, SOURCE_BLOCK = 32, SOURCE_BYTES = 24;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int) {
        put_factors(block, column, source);
        for (int i = 0; i < 32; i++) put_number(block, i, column, five_bits_of_32(source + 4, i));
    }
};

struct Q4_K : Blocks<SmallScalesAndMinima, Nibbles<0>, 32> {
    static constexpr int ID = ALLM_Q4_K, SOURCE_BLOCK = 256, SOURCE_BYTES = 144;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        put_six_bits(block, column, source, part);
        const uint8_t* bytes = source + 16 + part / 2 * 32;  // the low halves are one part, the high halves the next
        for (int i = 0; i < 32; i++) put_number(block, i, column, bytes[i] >> part % 2 * 4 & 15);
    }
};

struct Q5_K : Blocks<SmallScalesAndMinima, Bytes, 32> {
    static constexpr int ID = ALLM_Q5_K, SOURCE_BLOCK = 256, SOURCE_BYTES = 176;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        put_six_bits(block, column, source, part);
        const uint8_t *fifth = source + 16, *bytes = source + 48 + part / 2 * 32;
        for (int i = 0; i < 32; i++)
            put_number(block, i, column, (bytes[i] >> part % 2 * 4 & 15) | (fifth[i] >> part & 1) << 4);
    }
};

struct Q6_K : Blocks<Int8Scales, Bytes, 16> {
    static constexpr int ID = ALLM_Q6_K, SOURCE_BLOCK = 256, SOURCE_BYTES = 210;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        put_factors(block, column, source + 208, source[192 + part]);
        const uint8_t *four = source + part / 8 * 64, *two = source + 128 + part / 8 * 32;  // of this half of the numbers
        for (int i = 0; i < 16; i++) {
            int n = part % 8 * 16 + i;
            int value = (four[n % 64] >> n / 64 * 4 & 15) | (two[n % 32] >> n / 32 * 2 & 3) << 4;
            put_number(block, i, column, value - 32);
        }
    }
};

// The n-th of 256 numbers of 2 bits: two runs of 32 bytes, each with four runs of 32 numbers by the place of their bits.
ALLM_INLINE int two_bits_of_256(const uint8_t* bytes, int n) {
    return bytes[n / 128 * 32 + n % 32] >> n % 128 / 32 * 2 & 3;
}

struct Q2_K : Blocks<SmallScalesAndMinima, Nibbles<0>, 16> {
    static constexpr int ID = ALLM_Q2_K, SOURCE_BLOCK = 256, SOURCE_BYTES = 84;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        put_factors(block, column, source + 80, source[part] & 15, source[part] >> 4);
        for (int i = 0; i < 16; i++) put_number(block, i, column, two_bits_of_256(source + 16, part * 16 + i));
    }
};

struct Q3_K : Blocks<Int8Scales, Nibbles<4>, 16> {
    static constexpr int ID = ALLM_Q3_K, SOURCE_BLOCK = 256, SOURCE_BYTES = 110;
    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        const uint8_t* packed = source + 96;  // of 16 scales the low four bits in 8 bytes, the high two in 4
        int scale = (packed[part % 8] >> part / 8 * 4 & 15) | (packed[8 + part % 4] >> part / 4 * 2 & 3) << 4;
        put_factors(block, column, source + 108, scale - 32);
        for (int i = 0; i < 16; i++) {
            int n = part * 16 + i, third = source[n % 32] >> n / 32 & 1;
            put_number(block, i, column, two_bits_of_256(source + 32, n) - 4 * (1 - third));
        }
    }
};

}  // namespace allm
