// Vectors of 16-bit numbers, and their dot products: what the integer kernels need beyond simd.h.
//
// A vh holds a pair of k for each of W columns: column c has lanes 2 c and 2 c + 1. Sums are exact as long as they fit into
// 32 bits, so every instruction set and every order of the operations gives the same integers.
#pragma once

#include "simd.h"

namespace allm {

typedef int16_t vh __attribute__((vector_size(4 * W), may_alias));
typedef int8_t vb __attribute__((vector_size(2 * W), may_alias));  // 2 W bytes
typedef int8_t vb_unaligned __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef uint8_t vub __attribute__((vector_size(2 * W), may_alias));
typedef uint8_t vub_unaligned __attribute__((vector_size(2 * W), aligned(1), may_alias));
typedef uint16_t vuh __attribute__((vector_size(4 * W), may_alias));

// Whether the machine has the fused multiply-add of pairs: asked once, when the library is loaded (library.cpp).
bool has_fused_dot();

ALLM_INLINE vh load_i8_pairs(const uint8_t* p) {
#if ALLM_AVX512
    return (vh)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif ALLM_AVX2
    return (vh)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
    return __builtin_convertvector((vb)*(const vb_unaligned*)p, vh);
#endif
}
// 2 W bytes -> their low nibbles and their high nibbles
ALLM_INLINE void load_nibble_pairs(const uint8_t* p, vh& low, vh& high) {
#if ALLM_AVX512
    vuh bytes = (vuh)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif ALLM_AVX2
    vuh bytes = (vuh)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
    vuh bytes = __builtin_convertvector((vub)*(const vub_unaligned*)p, vuh);
#endif
    low = (vh)(bytes & 15);
    high = (vh)(bytes >> 4);
}
ALLM_INLINE vh broadcast_pair(const int16_t* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof(pair));
    return (vh)broadcast_int(pair);
}

// sum + a0 * b0 + a1 * b1 for each column. FUSED: by the one instruction of AVX-512 VNNI or AVX-VNNI, which no intrinsic
// gives in code that also has to run without it.
template <bool FUSED>
ALLM_INLINE vi dot(vh a, vh b, vi sum) {
#if ALLM_AVX512
    if constexpr (FUSED) asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    else sum = (vi)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
    return sum;
#elif ALLM_AVX2
    if constexpr (FUSED) asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    else sum = (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
    return sum;
#elif defined(__SSE2__)
    return (vi)_mm_add_epi32((__m128i)sum, _mm_madd_epi16((__m128i)a, (__m128i)b));
#elif defined(__aarch64__)
    int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    int32x4_t high = vmull_high_s16((int16x8_t)a, (int16x8_t)b);
    return sum + (vi)vpaddq_s32(low, high);
#else
    for (int c = 0; c < W; c++) sum[c] += a[2 * c] * b[2 * c] + a[2 * c + 1] * b[2 * c + 1];
    return sum;
#endif
}

ALLM_INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }

ALLM_INLINE vi max(vi a, vi b) { return a > b ? a : b; }

// Fold the lanes of x by one operation, in any order: they are integers.
template <class Operation>
ALLM_INLINE int32_t fold_lanes(vi x, Operation&& both) {
#if ALLM_AVX512 || ALLM_AVX2
#if ALLM_AVX512
    __m256i half = both(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
#else
    __m256i half = (__m256i)x;
#endif
    half = both(half, _mm256_permute2x128_si256(half, half, 1));
    half = both(half, _mm256_shuffle_epi32(half, 0x4e));
    half = both(half, _mm256_shuffle_epi32(half, 0xb1));
    return _mm256_cvtsi256_si32(half);
#else
    vi low{x[0]}, high{x[1]};
    for (int i = 2; i < W; i += 2) {
        low = both(low, vi{x[i]});
        high = both(high, vi{x[i + 1]});
    }
    return both(low, high)[0];
#endif
}
#if ALLM_AVX512 || ALLM_AVX2
ALLM_INLINE int32_t max_lane(vi x) {
    return fold_lanes(x, [](__m256i a, __m256i b) ALLM_LAMBDA_INLINE { return _mm256_max_epi32(a, b); });
}
ALLM_INLINE int32_t sum_lanes(vi x) {
    return fold_lanes(x, [](__m256i a, __m256i b) ALLM_LAMBDA_INLINE { return _mm256_add_epi32(a, b); });
}
#else
ALLM_INLINE int32_t max_lane(vi x) {
    return fold_lanes(x, [](vi a, vi b) ALLM_LAMBDA_INLINE { return max(a, b); });
}
ALLM_INLINE int32_t sum_lanes(vi x) {
    return fold_lanes(x, [](vi a, vi b) ALLM_LAMBDA_INLINE { return a + b; });
}
#endif

// W integers that fit into 16 bits
ALLM_INLINE void store_i16(int16_t* p, vi x) {
#if ALLM_AVX512
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif ALLM_AVX2
    __m256i packed = _mm256_packs_epi32((__m256i)x, (__m256i)x);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    for (int i = 0; i < W; i++) p[i] = (int16_t)x[i];
#endif
}

}  // namespace allm
