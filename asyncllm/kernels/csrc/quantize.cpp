// Quantizing activations. A group's scale is its greatest magnitude / 32767; each number is rounded to the nearest integer,
// halves to even. The error is at most 1/65534 of the group's greatest number: far below that of 8-bit weights.
//
// A group with a NaN or an infinity gets a NaN for its scale, so that a product with it is not finite: as in fp32.
#include "quantize.h"

#include <pthread.h>
#include <stdlib.h>

#include "simd_integer.h"
#include "threads.h"

namespace allm {
namespace {

constexpr float LARGEST = 32767.0f;
constexpr float NOTHING = 0x1p-100f;  // a group below this is all zeros: its inverse scale would overflow
constexpr int64_t ALONE = 8192;       // numbers that the calling thread quantizes sooner than a second thread awakes

// ---- memory of the calling thread, kept for its next call and freed when it ends -----------------------------------

struct Memory {
    void* start;
    size_t bytes;
};

__thread Memory memory;
pthread_key_t key;
pthread_once_t key_made = PTHREAD_ONCE_INIT;

void* reserve(size_t wanted) {
    if (wanted <= memory.bytes) return memory.start;
    pthread_once(&key_made, [] { pthread_key_create(&key, free); });
    free(memory.start);
    memory.bytes = (wanted + wanted / 4 + 4095) / 4096 * 4096;
    memory.start = aligned_alloc(64, memory.bytes);
    if (!memory.start) memory.bytes = 0;
    pthread_setspecific(key, memory.start);
    return memory.start;
}

// ---- one group -----------------------------------------------------------------------------------------------------

// Greatest magnitude of 32 numbers, compared as integers: NaN is greater than infinity, and infinity than all others.
ALLM_INLINE float greatest(const float* x) {
    vi top = broadcast_int(0);
    for (int i = 0; i < GROUP; i += W) top = max(top, (vi)load(x + i) & 0x7fffffff);
    return __builtin_bit_cast(float, max_lane(top));
}

void quantize_group(const float* x, int16_t* values, GroupFactors& factors) {
    float top = greatest(x);
    if (!(top < INFINITY)) {
        memset(values, 0, GROUP * sizeof(int16_t));
        factors = {NAN, NAN, {NAN, NAN}};
        return;
    }
    float scale = top < NOTHING ? 0.0f : top / LARGEST;
    vf inverse = broadcast(top < NOTHING ? 0.0f : LARGEST / top);
    const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer and leaves it in the low bits
    vi sums[2] = {broadcast_int(0), broadcast_int(0)};
    for (int i = 0; i < GROUP; i += W) {
        vi q = (vi)(load(x + i) * inverse + magic) - (vi)magic;
        sums[i / (GROUP / 2)] += q;
        store_i16(values + i, q);
    }
    int32_t first = sum_lanes(sums[0]), last = sum_lanes(sums[1]);
    factors = {scale, scale * (float)(first + last), {scale * (float)first, scale * (float)last}};
}

void quantize_row(const float* x, int64_t k, int16_t* values, GroupFactors* factors) {
    int64_t whole = k / GROUP;
    for (int64_t g = 0; g < whole; g++) quantize_group(x + g * GROUP, values + g * GROUP, factors[g]);
    if (k % GROUP == 0) return;
    float rest[GROUP] = {};
    memcpy(rest, x + whole * GROUP, sizeof(float) * (k % GROUP));
    quantize_group(rest, values + whole * GROUP, factors[whole]);
}

}  // namespace

int32_t quantize_rows(allm_pool* pool, const float* x, int64_t x_stride, int64_t m, int64_t k, QuantizedRows* rows) {
    const int64_t groups = ceil_div(k, GROUP), width = groups * GROUP;
    *rows = {nullptr, nullptr, groups};
    if (m == 0) return ALLM_OK;
    uint8_t* start = (uint8_t*)reserve(m * groups * (GROUP * sizeof(int16_t) + sizeof(GroupFactors)));
    if (!start) return ALLM_NO_MEMORY;
    *rows = {(int16_t*)start, (GroupFactors*)(start + m * width * sizeof(int16_t)), groups};
    auto quantize = [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; r++)
            quantize_row(x + r * x_stride, k, rows->values + r * width, rows->factors + r * groups);
    };
    return parallel_rows(pool, m, larger<int64_t>(1, ALONE / k), quantize);
}

}  // namespace allm
