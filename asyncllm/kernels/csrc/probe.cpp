// What this machine can do, measured with the pool's own threads: the roofs that benchmarks compare kernels with.
#include "simd.h"
#include "threads.h"

using namespace allm;

// Fused multiply-adds in registers. Returns the number of floating point operations done.
int64_t allm_probe_multiply_add(allm_pool* pool, int64_t rounds) {
    constexpr int SUMS = NUM_REGISTERS == 32 ? 24 : 12;
    const int64_t tasks = num_threads(pool);
    auto task = [&](int64_t, uint8_t* scratch) {
        vf sum[SUMS];
        unroll<SUMS>([&](auto j) ALLM_LAMBDA_INLINE { sum[j] = broadcast(0.1f * j); });
        vf a = broadcast(0.999f), b = broadcast(0.001f);
        for (int64_t i = 0; i < rounds; i++) {
            unroll<SUMS>([&](auto j) ALLM_LAMBDA_INLINE { sum[j] = fma(sum[j], a, b); });
            forget_memory();
        }
        unroll<SUMS>([&](auto j) ALLM_LAMBDA_INLINE { store((float*)scratch + j * W, sum[j]); });
    };
    if (parallel_for(pool, tasks, SUMS * W * sizeof(float), task) != ALLM_OK) return 0;
    return tasks * rounds * SUMS * W * 2;
}

// Read `bytes` of memory once, in one piece per thread. Returns the number of bytes read.
int64_t allm_probe_read(allm_pool* pool, const void* memory, int64_t bytes) {
    const int64_t tasks = num_threads(pool), per_task = bytes / tasks / (8 * W * (int64_t)sizeof(float)) * 8 * W;
    auto task = [&](int64_t index, uint8_t* scratch) {
        const float* p = (const float*)memory + index * per_task;
        vf sum[8];
        unroll<8>([&](auto j) ALLM_LAMBDA_INLINE { sum[j] = zero(); });
        for (int64_t i = 0; i < per_task; i += 8 * W)
            unroll<8>([&](auto j) ALLM_LAMBDA_INLINE { sum[j] += load(p + i + j * W); });
        unroll<8>([&](auto j) ALLM_LAMBDA_INLINE { store((float*)scratch + j * W, sum[j]); });
    };
    if (parallel_for(pool, tasks, 8 * W * sizeof(float), task) != ALLM_OK) return 0;
    return tasks * per_task * (int64_t)sizeof(float);
}
