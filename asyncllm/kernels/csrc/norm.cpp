// RMSNorm and LayerNorm of rows, with the residual added on the way. Sums run over 16 virtual lanes, so that they are
// equal for every vector width.
#include "norm.h"

#include "simd.h"
#include "threads.h"

namespace allm {
namespace {

// sum of f(x[i]) over a row: element i goes to lane i % 16, lanes are folded at the end
template <class F>
ALLM_INLINE float row_sum(const float* x, int64_t n, F&& add) {
    Lanes total = lanes(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int part = 0; part < PARTS; part++) total.part[part] = add(load(x + i + part * W), total.part[part]);
    if (i < n) {  // the rest, as a full line whose other elements add nothing
        float rest[LANES];
        for (int j = 0; j < LANES; j++) rest[j] = i + j < n ? x[i + j] : NAN;
        for (int part = 0; part < PARTS; part++) {
            vf v = load(rest + part * W), before = total.part[part];
            vi inside = broadcast_int((int32_t)(n - i - part * W)) > lane_index();
            total.part[part] = where(inside, add(v, before), before);
        }
    }
    return sum(total);
}

// y = (x - shift) * factor * weight + bias
void scale_row(const allm_norm& norm, const float* x, float shift, float factor, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float v = (x[i] - shift) * factor;
        if (norm.weight) v *= norm.weight[i];
        y[i] = norm.bias ? v + norm.bias[i] : v;
    }
}

}  // namespace

void norm_row(const allm_norm& norm, const float* x, float* y, int64_t n) {
    if (norm.kind == ALLM_NORM_RMS) {
        float squares = row_sum(x, n, [](vf v, vf total) { return fma(v, v, total); });
        scale_row(norm, x, 0.0f, 1.0f / sqrtf(squares / (float)n + norm.eps), y, n);
    } else if (norm.kind == ALLM_NORM_LAYER) {
        float mean = row_sum(x, n, [](vf v, vf total) { return total + v; }) / (float)n;
        float squares = row_sum(x, n, [mean](vf v, vf total) {
            vf centred = v - broadcast(mean);
            return fma(centred, centred, total);
        });
        scale_row(norm, x, mean, 1.0f / sqrtf(squares / (float)n + norm.eps), y, n);
    } else if (x != y) {
        memcpy(y, x, sizeof(float) * n);
    }
}

int32_t add_norm(allm_pool* pool, const allm_norm& norm, float* x, int64_t x_stride, const float* residual,
                 int64_t residual_stride, float* y, int64_t y_stride, int64_t m, int64_t n) {
    auto rows = [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++) {
            float* row = x + r * x_stride;
            const float* added = residual ? residual + r * residual_stride : nullptr;
            for (int64_t i = 0; added && i < n; i++) row[i] += added[i];
            norm_row(norm, row, y + r * y_stride, n);
        }
    };
    return parallel_rows(pool, m, 8, rows);
}

}  // namespace allm

int32_t allm_add_norm(allm_pool* pool, const allm_norm* norm, float* x, int64_t x_stride, const float* residual,
                      int64_t residual_stride, float* y, int64_t y_stride, int64_t m, int64_t n) {
    return allm::add_norm(pool, *norm, x, x_stride, residual, residual_stride, y, y_stride, m, n);
}
