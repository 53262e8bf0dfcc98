// Matrix products over packed weights, as building blocks for the step: several linears in one parallel loop.
#pragma once

#include "formats.h"
#include "threads.h"

namespace allm {

// One product of a group: y[m, :] = x[m, :] @ linear.T + bias. All products of a group share x.
struct Product {
    const allm_linear* linear;
    float* y;
    int64_t y_stride;
};

int32_t multiply_group(allm_pool* pool, const float* x, int64_t x_stride, int64_t m, const Product* products, int count);

void activate(int32_t activation, const float* gate, const float* up, float* y, int64_t n);  // activation.cpp

}  // namespace allm
