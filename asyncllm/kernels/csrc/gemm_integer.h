// Matrix products in integers over packed panels, as building blocks for gemm.cpp.
#pragma once

#include "formats.h"
#include "quantize.h"

namespace allm {

constexpr int INTEGER_KC = 512;  // k that one panel of widened weights holds

struct IntegerScratch {  // of one thread
    alignas(64) uint8_t panel[INTEGER_KC / 16 * WideBlocks<true, 16>::BYTES];  // these take the most
};

// y = rows [first_row, first_row + rows) of x times `count` whole panels from `first_panel` on.
void multiply_integers(const QuantizedRows& x, int64_t first_row, int64_t rows, const allm_linear& linear,
                       int64_t first_panel, int64_t count, float* y, int64_t y_stride, IntegerScratch* scratch);

}  // namespace allm
