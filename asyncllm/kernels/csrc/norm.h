// Norms of one row, for the norm, rotary and step files.
#pragma once

#include "asyncllm_kernels.h"

namespace allm {

void norm_row(const allm_norm& norm, const float* x, float* y, int64_t n);  // y may be x

int32_t add_norm(allm_pool* pool, const allm_norm& norm, float* x, int64_t x_stride, const float* residual,
                 int64_t residual_stride, float* y, int64_t y_stride, int64_t m, int64_t n);

}  // namespace allm
