// The thread pool: parallel loops whose iterations are independent, so that who runs which never shows in a result.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "asyncllm_kernels.h"

namespace allm {

// One loop: run(context, i, scratch) for every i in [0, count). `scratch` is the running thread's own memory.
struct Loop {
    void (*run)(void* context, int64_t index, uint8_t* scratch);
    void* context;
    int64_t count;
    size_t scratch_bytes;
};

int32_t run_loop(allm_pool* pool, const Loop& loop);
int32_t num_threads(const allm_pool* pool);

// body(index, scratch); returns an allm_status.
template <class Body>
int32_t parallel_for(allm_pool* pool, int64_t count, size_t scratch_bytes, Body& body) {
    auto run = [](void* context, int64_t index, uint8_t* scratch) { (*static_cast<Body*>(context))(index, scratch); };
    return run_loop(pool, Loop{run, &body, count, scratch_bytes});
}

// The same over ranges of rows, `grain` rows at a time: body(first, last).
template <class Body>
int32_t parallel_rows(allm_pool* pool, int64_t rows, int64_t grain, Body& body) {
    auto chunk = [&](int64_t index, uint8_t*) {
        int64_t first = index * grain, last = first + grain;
        body(first, last < rows ? last : rows);
    };
    return parallel_for(pool, (rows + grain - 1) / grain, 0, chunk);
}

}  // namespace allm
