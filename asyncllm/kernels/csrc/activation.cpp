// Activations, alone or gated: activation(gate) * up.
#include "gemm.h"

namespace allm {
namespace {

ALLM_INLINE vf sigmoid_times(vf x, vf slope_of) { return x / (broadcast(1.0f) + exp(-slope_of)); }

struct Relu {
    static ALLM_INLINE vf apply(vf x) { return max(zero(), x); }
};
struct Silu {
    static ALLM_INLINE vf apply(vf x) { return sigmoid_times(x, x); }
};
struct GeluTanh {  // x / 2 (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    static ALLM_INLINE vf apply(vf x) {
        vf cubic = fma(x * x * x, broadcast(0.044715f), x);
        return sigmoid_times(x, broadcast(1.5957691216f) * cubic);
    }
};
struct Gelu {
    static ALLM_INLINE vf apply(vf x) {
        for (int i = 0; i < W; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
        return x;
    }
};
struct Identity {
    static ALLM_INLINE vf apply(vf x) { return x; }
};

template <class Function>
void apply(const float* gate, const float* up, float* y, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        vf v = Function::apply(load(gate + i));
        store(y + i, up ? v * load(up + i) : v);
    }
    for (; i < n; i++) {
        float v = Function::apply(broadcast(gate[i]))[0];
        y[i] = up ? v * up[i] : v;
    }
}

}  // namespace

void activate(int32_t activation, const float* gate, const float* up, float* y, int64_t n) {
    switch (activation) {
        case ALLM_RELU: return apply<Relu>(gate, up, y, n);
        case ALLM_SILU: return apply<Silu>(gate, up, y, n);
        case ALLM_GELU_TANH: return apply<GeluTanh>(gate, up, y, n);
        case ALLM_GELU: return apply<Gelu>(gate, up, y, n);
        default: return apply<Identity>(gate, up, y, n);
    }
}

}  // namespace allm

using namespace allm;

int32_t allm_activate(allm_pool* pool, int32_t activation, const float* gate, int64_t gate_stride, const float* up,
                      int64_t up_stride, float* y, int64_t y_stride, int64_t m, int64_t n) {
    auto rows = [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            activate(activation, gate + r * gate_stride, up ? up + r * up_stride : nullptr, y + r * y_stride, n);
    };
    return parallel_rows(pool, m, 8, rows);
}
