// The layout of a paged KV cache (described in asyncllm_kernels.h) and its number formats.
#pragma once

#include "asyncllm_kernels.h"
#include "simd.h"

namespace allm {

constexpr int GROUP = 16;  // tokens whose keys lie side by side
constexpr int CACHE_LINE_BYTES = 64;

// A format says what an element is. SCALED: a group begins with one fp32 scale for each of its tokens, and an element
// times its token's scale is the number.
struct KvF32 {
    using Element = float;
    static constexpr bool SCALED = false;
    static ALLM_INLINE vf load(const float* p) { return allm::load(p); }
    static ALLM_INLINE float get(float x) { return x; }
    static ALLM_INLINE float put(float x) { return x; }
};
struct KvBF16 {
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static ALLM_INLINE vf load(const uint16_t* p) { return load_bf16(p); }
    static ALLM_INLINE float get(uint16_t x) { return from_bf16(x); }
    static ALLM_INLINE uint16_t put(float x) { return to_bf16(x); }
};
struct KvF16 {
    using Element = uint16_t;
    static constexpr bool SCALED = false;
    static ALLM_INLINE vf load(const uint16_t* p) { return load_f16(p); }
    static ALLM_INLINE float get(uint16_t x) { return from_f16(x); }
    static ALLM_INLINE uint16_t put(float x) { return to_f16(x); }
};
struct KvI8 {
    using Element = int8_t;
    static constexpr bool SCALED = true;
    static ALLM_INLINE vf load(const int8_t* p) { return load_i8(p); }
    static ALLM_INLINE float get(int8_t x) { return (float)x; }
    // x is a multiple of the scale within ±127; rounds to nearest, ties to even. NaN becomes some number: the scale says it.
    static ALLM_INLINE int8_t put(float x) {
        x = x > 127.0f ? 127.0f : x > -127.0f ? x : -127.0f;
        return (int8_t)(__builtin_bit_cast(int32_t, x + 12582912.0f) & 0xff);
    }
    // The scale of a token's head: 0 for zeros, and not finite where a number is not, so that no NaN gets lost.
    static float scale(const float* x, int64_t n) {
        float greatest = 0.0f;
        for (int64_t i = 0; i < n; i++) {
            float magnitude = __builtin_fabsf(x[i]);
            greatest = magnitude <= greatest || greatest != greatest ? greatest : magnitude;
        }
        return greatest / 127.0f;
    }
};

template <class Body>
ALLM_INLINE bool with_kv_format(int32_t id, Body&& body) {
    switch (id) {
        case ALLM_F32: body(KvF32{}); return true;
        case ALLM_BF16: body(KvBF16{}); return true;
        case ALLM_F16: body(KvF16{}); return true;
        case ALLM_KV_I8: body(KvI8{}); return true;
        default: return false;
    }
}

inline bool is_valid(const allm_kv_cache& cache) {
    return with_kv_format(cache.format, [](auto) {}) && cache.block_size > 0 && cache.head_dim > 0 && cache.num_kv_heads > 0;
}

// Sizes and offsets in bytes. A group of keys or values is found at its elements; its scales lie in the 64 bytes before.
struct KvLayout {
    int64_t head_dim, value_stride, block_size, padded_block, num_kv_heads;
    int64_t element_bytes, scale_bytes, key_bytes, value_bytes, head_bytes, block_bytes;

    explicit KvLayout(const allm_kv_cache& cache)
        : head_dim(cache.head_dim), value_stride(round_up(cache.head_dim, GROUP)), block_size(cache.block_size),
          padded_block(round_up(cache.block_size, GROUP)), num_kv_heads(cache.num_kv_heads), element_bytes(0), scale_bytes(0) {
        with_kv_format(cache.format, [&](auto format) {
            element_bytes = sizeof(typename decltype(format)::Element);
            scale_bytes = decltype(format)::SCALED ? GROUP * sizeof(float) : 0;
        });
        key_bytes = scale_bytes + GROUP * head_dim * element_bytes;
        value_bytes = scale_bytes + GROUP * value_stride * element_bytes;
        head_bytes = round_up(padded_block / GROUP * (key_bytes + value_bytes), CACHE_LINE_BYTES);
        block_bytes = head_bytes * num_kv_heads;
    }

    bool has_holes() const { return padded_block != block_size; }
    // Where a token lies in its row when the holes of the blocks before it count too.
    int64_t place(int64_t token) const { return has_holes() ? token / block_size * padded_block + token % block_size : token; }
    // The group's keys and values, for a group of a block.
    int64_t keys(int64_t block, int64_t kv_head, int64_t group) const {
        return block * block_bytes + kv_head * head_bytes + group * key_bytes + scale_bytes;
    }
    int64_t values(int64_t block, int64_t kv_head, int64_t group) const {
        return block * block_bytes + kv_head * head_bytes + padded_block / GROUP * key_bytes + group * value_bytes +
               scale_bytes;
    }
};

ALLM_INLINE const float* scales_of(const uint8_t* group) { return (const float*)group - GROUP; }
ALLM_INLINE float* scales_of(uint8_t* group) { return (float*)group - GROUP; }

// One token of one head in its group: elements i of the key are GROUP apart, those of the value follow each other.
template <class Kv>
struct KvToken {
    using Element = typename Kv::Element;
    Element *key, *value;
    float *key_scale, *value_scale;

    KvToken(const KvLayout& layout, void* blocks, int64_t slot, int64_t kv_head) {
        int64_t block = slot / layout.block_size, offset = slot % layout.block_size, lane = offset % GROUP;
        uint8_t* keys = (uint8_t*)blocks + layout.keys(block, kv_head, offset / GROUP);
        uint8_t* values = (uint8_t*)blocks + layout.values(block, kv_head, offset / GROUP);
        key = (Element*)keys + lane;
        value = (Element*)values + lane * layout.value_stride;
        key_scale = scales_of(keys) + lane;
        value_scale = scales_of(values) + lane;
    }
};

}  // namespace allm
