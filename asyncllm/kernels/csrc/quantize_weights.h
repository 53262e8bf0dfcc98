// Weights that a checkpoint stores unquantized as blocks of Q8_0 and Q4_1.
#pragma once

#include <stdint.h>

namespace allm {

constexpr int WEIGHT_BLOCK = 32;

// The blocks of ggml's quantize_row_q8_0_ref, bit for bit: scale = greatest magnitude / 127, halves rounded away from zero.
void quantize_q8_0(const float* x, uint8_t* block);

// 4 bits with the scale and minimum that give the least squared error of those tried.
void quantize_q4_1(const float* x, uint8_t* block);

}  // namespace allm
