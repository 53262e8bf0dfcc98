// Rotary positions, the norms of query and key heads before them, and writing keys and values into the paged cache.
#include "kv.h"
#include "norm.h"
#include "threads.h"

namespace allm {
namespace {

void rotate(const allm_rotary& rotary, int64_t position, float* head) {
    const int64_t half = rotary.dim / 2;
    const float* cos = rotary.cos + position * half;
    const float* sin = rotary.sin + position * half;
    const int64_t step = rotary.interleaved ? 2 : 1, apart = rotary.interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        float a = head[i * step], b = head[i * step + apart];
        head[i * step] = a * cos[i] - b * sin[i];
        head[i * step + apart] = b * cos[i] + a * sin[i];
    }
}

void prepare_heads(const allm_rotary* rotary, const allm_norm* norm, int64_t position, float* heads, int64_t count, int64_t dim) {
    for (int64_t h = 0; h < count; h++) {
        float* head = heads + h * dim;
        if (norm && norm->kind != ALLM_NORM_NONE) norm_row(*norm, head, head, dim);
        if (rotary && rotary->dim) rotate(*rotary, position, head);
    }
}

// to[i * stride] = from[i] in the cache's format
template <class Kv>
void put(const float* from, int64_t n, typename Kv::Element* to, int64_t stride, float* scale) {
    if constexpr (Kv::SCALED) {
        *scale = Kv::scale(from, n);
        for (int64_t i = 0; i < n; i++) to[i * stride] = Kv::put(*scale == 0.0f ? 0.0f : from[i] / *scale);
    } else {
        for (int64_t i = 0; i < n; i++) to[i * stride] = Kv::put(from[i]);
    }
}

template <class Kv>
void get(const typename Kv::Element* from, int64_t stride, const float* scale, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i++) to[i] = Kv::get(from[i * stride]);
    if constexpr (Kv::SCALED)
        for (int64_t i = 0; i < n; i++) to[i] *= *scale;
}

template <class Kv>
void write(const KvLayout& layout, void* blocks, int64_t slot, const float* key, const float* value) {
    const int64_t dim = layout.head_dim;
    for (int64_t h = 0; h < layout.num_kv_heads; h++) {
        KvToken<Kv> to(layout, blocks, slot, h);
        put<Kv>(key + h * dim, dim, to.key, GROUP, to.key_scale);
        put<Kv>(value + h * dim, dim, to.value, 1, to.value_scale);
    }
}

}  // namespace
}  // namespace allm

using namespace allm;

int64_t allm_kv_block_bytes(const allm_kv_cache* cache) {
    if (!is_valid(*cache)) return ALLM_BAD_ARGUMENT;
    return KvLayout(*cache).block_bytes;
}

int32_t allm_rotate_and_write(allm_pool* pool, const allm_kv_cache* cache, const allm_rotary* rotary,
                              const allm_norm* query_norm, const allm_norm* key_norm, float* query, int64_t query_stride,
                              int32_t num_heads, float* key, int64_t key_stride, const float* value, int64_t value_stride,
                              const int64_t* positions, const int64_t* slots, int64_t num_tokens) {
    if (!is_valid(*cache) || (rotary && rotary->dim > cache->head_dim)) return ALLM_BAD_ARGUMENT;
    KvLayout layout(*cache);
    int32_t status = ALLM_BAD_ARGUMENT;
    with_kv_format(cache->format, [&](auto format) {
        using Kv = decltype(format);
        auto tokens = [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++) {
                int64_t position = positions ? positions[t] : 0;
                if (query) prepare_heads(rotary, query_norm, position, query + t * query_stride, num_heads, layout.head_dim);
                prepare_heads(rotary, key_norm, position, key + t * key_stride, layout.num_kv_heads, layout.head_dim);
                if (slots[t] < 0) continue;
                write<Kv>(layout, cache->blocks, slots[t], key + t * key_stride, value + t * value_stride);
            }
        };
        status = parallel_rows(pool, num_tokens, 8, tokens);
    });
    return status;
}

int32_t allm_read_kv(const allm_kv_cache* cache, const int64_t* slots, int64_t count, float* key, float* value) {
    if (!is_valid(*cache)) return ALLM_BAD_ARGUMENT;
    KvLayout layout(*cache);
    with_kv_format(cache->format, [&](auto format) {
        using Kv = decltype(format);
        const int64_t dim = layout.head_dim;
        for (int64_t t = 0; t < count; t++) {
            for (int64_t h = 0; h < layout.num_kv_heads; h++, key += dim, value += dim) {
                KvToken<Kv> from(layout, cache->blocks, slots[t], h);
                get<Kv>(from.key, GROUP, from.key_scale, dim, key);
                get<Kv>(from.value, 1, from.value_scale, dim, value);
            }
        }
    });
    return ALLM_OK;
}
