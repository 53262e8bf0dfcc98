// Weights that a checkpoint stores unquantized as numbers of 8 or 4 bits.
//
// W blocks are quantized at once, one per lane: every lane does the operations of its own block in one order, so that the
// numbers do not depend on the vector width.
#pragma once

#include "simd.h"

namespace allm {

constexpr int WEIGHT_BLOCK = 32;

// Lane r of x[i]: the i-th weight of block r. What comes out: weight = scale * number + minimum.
struct WeightBlocks {
    vf x[WEIGHT_BLOCK];
    vf scale, minimum;
    vf numbers[WEIGHT_BLOCK];
};

// As ggml's quantize_row_q8_0_ref, bit for bit: scale = greatest magnitude / 127, halves are rounded away from zero.
void quantize_8_bits(WeightBlocks& blocks);

// Numbers 0 … 15, with the scale and minimum of least squared error among those tried.
void quantize_4_bits(WeightBlocks& blocks);

}  // namespace allm
