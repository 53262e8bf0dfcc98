// Activations as the integer kernels take them: 16-bit numbers with one factor per row and 32 k.
#pragma once

#include "panels.h"

namespace allm {

constexpr int GROUP = 32;  // k that share a factor

// What a group of a row has besides its numbers q: x = scale * q within half a scale.
struct GroupFactors {
    float scale;
    float sum;           // scale * (sum of q), for formats with minima
    float half_sums[2];  // the same of the first and of the last 16
};

// m rows; k is filled up with zeros to whole groups.
struct QuantizedRows {
    int16_t* values;        // [m][groups * GROUP]
    GroupFactors* factors;  // [m][groups]
    int64_t groups;
};

// Quantize m rows of x into memory of the calling thread, valid until its next call. Returns an allm_status.
int32_t quantize_rows(allm_pool* pool, const float* x, int64_t x_stride, int64_t m, int64_t k, QuantizedRows* rows);

}  // namespace allm
