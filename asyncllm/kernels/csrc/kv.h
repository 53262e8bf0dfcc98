// The layout of a paged KV cache (described in asyncllm_kernels.h) and its number formats.
#pragma once

#include "asyncllm_kernels.h"
#include "simd.h"

namespace allm {

constexpr int GROUP = 16;  // tokens whose keys lie side by side

struct KvLayout {
    int64_t head_dim, value_stride, block_size, num_kv_heads;
    int64_t key_elements, head_elements, block_elements;

    explicit KvLayout(const allm_kv_cache& cache)
        : head_dim(cache.head_dim), value_stride(round_up(cache.head_dim, GROUP)), block_size(cache.block_size),
          num_kv_heads(cache.num_kv_heads), key_elements(head_dim * block_size),
          head_elements(key_elements + value_stride * block_size), block_elements(head_elements * num_kv_heads) {}

    int64_t head(int64_t block, int64_t kv_head) const { return block * block_elements + kv_head * head_elements; }
    // element 0 of the key of the token at `offset` in its block; the next elements follow GROUP apart
    int64_t key(int64_t offset) const { return offset / GROUP * head_dim * GROUP + offset % GROUP; }
    int64_t value(int64_t offset) const { return key_elements + offset * value_stride; }
};

struct KvF32 {
    using Element = float;
    static ALLM_INLINE vf load(const float* p) { return allm::load(p); }
    static ALLM_INLINE float get(float x) { return x; }
    static ALLM_INLINE float put(float x) { return x; }
};
struct KvBF16 {
    using Element = uint16_t;
    static ALLM_INLINE vf load(const uint16_t* p) { return load_bf16(p); }
    static ALLM_INLINE float get(uint16_t x) { return from_bf16(x); }
    static ALLM_INLINE uint16_t put(float x) { return to_bf16(x); }
};
struct KvF16 {
    using Element = uint16_t;
    static ALLM_INLINE vf load(const uint16_t* p) { return load_f16(p); }
    static ALLM_INLINE float get(uint16_t x) { return from_f16(x); }
    static ALLM_INLINE uint16_t put(float x) { return to_f16(x); }
};

template <class Body>
ALLM_INLINE bool with_kv_format(int32_t id, Body&& body) {
    switch (id) {
        case ALLM_F32: body(KvF32{}); return true;
        case ALLM_BF16: body(KvBF16{}); return true;
        case ALLM_F16: body(KvF16{}); return true;
        default: return false;
    }
}

inline bool is_valid(const allm_kv_cache& cache) {
    return cache.format >= ALLM_F32 && cache.format <= ALLM_F16 && cache.block_size > 0 && cache.block_size % GROUP == 0 &&
           cache.head_dim > 0 && cache.num_kv_heads > 0;
}

}  // namespace allm
