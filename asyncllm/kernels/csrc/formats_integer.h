// The quantized formats as the integer kernels read them: the numbers and factors of GGUF blocks, in another order.
//
// Within a panel the two k of a pair lie side by side for each column, as the instructions that multiply and add pairs want
// them. Factors that GGUF stores in fp16 stay so; a product of two numbers (Q4_K …) is stored as fp32, where it is exact.
#pragma once

#include "formats_gguf.h"
#include "simd_integer.h"

namespace allm {

// Where a block begins: [P] factors, [P] minima if there are any, in fp16 or fp32.
template <bool F16, bool MINIMA>
struct Factors {
    static constexpr int ARRAY = (F16 ? 2 : 4) * P, HEAD = MINIMA ? 2 * ARRAY : ARRAY;
    static ALLM_INLINE vf load_half(const uint8_t* block, int array, int half) {
        const uint8_t* p = block + array * ARRAY + half * ARRAY / 2;
        if constexpr (F16) return load_f16((const uint16_t*)p);
        else return load((const float*)p);
    }
    static void put(uint8_t* block, int array, int column, float value) {
        if constexpr (F16) ((uint16_t*)(block + array * ARRAY))[column] = to_f16(value);
        else ((float*)(block + array * ARRAY))[column] = value;
    }
    static float get(const uint8_t* block, int array, int column) {
        if constexpr (F16) return from_f16(((const uint16_t*)(block + array * ARRAY))[column]);
        else return ((const float*)(block + array * ARRAY))[column];
    }
};

// Numbers of BITS bits, `BLOCK` k with the same factors. Nibbles are stored with OFFSET added, low columns in the low bits.
template <int BITS, int OFFSET, bool F16, bool MINIMA_, int BLOCK_>
struct IntegerBlocks {
    static constexpr int BLOCK = BLOCK_;
    static constexpr bool MINIMA = MINIMA_, NIBBLES = BITS == 4, WIDE = false;
    using Head = Factors<F16, MINIMA>;
    static constexpr int PAIR = NIBBLES ? P : 2 * P;  // bytes of one pair of k
    static constexpr int BYTES = Head::HEAD + BLOCK / 2 * PAIR;

    // half 0: low columns, 1: high columns
    static ALLM_INLINE vf factors(const uint8_t* block, int half) { return Head::load_half(block, 0, half); }
    static ALLM_INLINE vf minima(const uint8_t* block, int half) { return Head::load_half(block, 1, half); }

    static ALLM_INLINE void pairs(const uint8_t* block, int pair, vh& low, vh& high) {
        const uint8_t* p = block + Head::HEAD + pair * PAIR;
        if constexpr (NIBBLES) {
            load_nibble_pairs(p, low, high);
            low -= (int16_t)OFFSET;
            high -= (int16_t)OFFSET;
        } else {
            low = load_i8_pairs(p);
            high = load_i8_pairs(p + P);
        }
    }

    static void put_line(uint8_t* block, int column, float factor, float minimum) {
        Head::put(block, 0, column, factor);
        if (MINIMA) Head::put(block, 1, column, minimum);
    }
    static int place(int i, int column) {
        return Head::HEAD + i / 2 * PAIR + 2 * (column % W) + i % 2 + (NIBBLES || column < W ? 0 : P);
    }
    static void put_number(uint8_t* block, int i, int column, int number) {
        uint8_t& byte = block[place(i, column)];
        int shift = column < W ? 0 : 4;
        byte = (uint8_t)(NIBBLES ? (byte & (0xf0 >> shift)) | (number + OFFSET) << shift : number);
    }
    static int number(const uint8_t* block, int i, int column) {
        uint8_t byte = block[place(i, column)];
        return NIBBLES ? (byte >> (column < W ? 0 : 4) & 15) - OFFSET : (int8_t)byte;
    }
    static float get(const uint8_t* block, int i, int column) {
        float scaled = Head::get(block, 0, column) * (float)number(block, i, column);
        return MINIMA ? scaled + Head::get(block, 1, column) : scaled;
    }
};

// The same widened to 16 bits, in the scratch memory of a thread that uses them for many rows: [P] fp32 factors, [P] minima
// if there are any, then the pairs as they are multiplied.
template <bool MINIMA_, int BLOCK_>
struct WideBlocks {
    static constexpr int BLOCK = BLOCK_, PAIR = 4 * P;
    static constexpr bool MINIMA = MINIMA_, NIBBLES = false, WIDE = true;
    using Head = Factors<false, MINIMA>;
    static constexpr int BYTES = Head::HEAD + BLOCK / 2 * PAIR;

    static ALLM_INLINE vf factors(const uint8_t* block, int half) { return Head::load_half(block, 0, half); }
    static ALLM_INLINE vf minima(const uint8_t* block, int half) { return Head::load_half(block, 1, half); }
    static ALLM_INLINE void pairs(const uint8_t* block, int pair, vh& low, vh& high) {
        const vh* both = (const vh*)(block + Head::HEAD + pair * PAIR);
        low = both[0];
        high = both[1];
    }

    template <class Format>
    static void expand(const uint8_t* from, uint8_t* to) {
        for (int half = 0; half < 2; half++) {
            store((float*)to + half * W, Format::factors(from, half));
            if constexpr (MINIMA) store((float*)to + P + half * W, Format::minima(from, half));
        }
        for (int pair = 0; pair < BLOCK / 2; pair++) {
            vh* both = (vh*)(to + Head::HEAD + pair * PAIR);
            Format::pairs(from, pair, both[0], both[1]);
        }
    }
};

// What the blocks of `Source` become: fp16 factors where they are stored so, except that formats of bytes with minima share
// their kernels.
template <class Source>
using IntegerBlocksOf =
    IntegerBlocks<Source::BITS, Source::OFFSET, Source::SOURCE_BLOCK == 32 && !(Source::BITS == 8 && Source::MINIMA),
                  Source::MINIMA, Source::BLOCK>;

// `Source`, a format of formats_gguf.h, for the integer kernels.
template <class Source>
struct Integer : IntegerBlocksOf<Source> {
    using Panel = IntegerBlocksOf<Source>;
    static constexpr int ID = ALLM_INTEGER + Source::ID;
    static constexpr int SOURCE_BLOCK = Source::SOURCE_BLOCK, SOURCE_BYTES = Source::SOURCE_BYTES;
    static constexpr bool QUANTIZED = true;

    static void put_block(uint8_t* block, int column, const uint8_t* source, int part) {
        uint8_t own[Source::BYTES];
        for (int i = 0; i < Source::BLOCK; i++) Source::clear(own, i, 0);  // the one column that is used
        Source::put_block(own, 0, source, part);
        Panel::put_line(block, column, Source::factor(own, 0), Source::minimum(own, 0));
        for (int i = 0; i < Source::BLOCK; i++) Panel::put_number(block, i, column, Source::number(own, i, 0));
    }
};

}  // namespace allm
