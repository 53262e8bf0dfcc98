// One vector of W floats and the few operations that the kernels need, for AVX-512, AVX2 and anything else.
// Arithmetic uses GCC/clang vector extensions; intrinsics appear only where a conversion or the fused multiply-add needs
// them. The library is compiled with -ffp-contract=off and every fused multiply-add is written as fma(): which operations
// are fused is then part of the source, not of the optimiser's mood, and results are equal across builds that have FMA.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ALLM_INLINE __attribute__((always_inline)) inline
#define ALLM_LAMBDA_INLINE __attribute__((always_inline))
#define ALLM_NOINLINE __attribute__((noinline))

namespace allm {

// unroll<N>(f) calls f(0) … f(N - 1) with constant arguments. Arrays of vectors that are only indexed so become registers
// in every compiler; gcc leaves them on the stack where it unrolls the loop too late.
template <class F, int... I>
ALLM_INLINE void unroll_over(F& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
ALLM_INLINE void unroll(F&& f) {
    unroll_over(f, std::make_integer_sequence<int, N>{});
}

// What was read from memory before must be read again: keeps a compiler from holding values in registers that a loop over
// accumulators needs more.
ALLM_INLINE void forget_memory() { asm volatile("" ::: "memory"); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define ALLM_AVX512 1
constexpr int W = 16;
constexpr int NUM_REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ALLM_AVX2 1
constexpr int W = 8;
constexpr int NUM_REGISTERS = 16;
#else
constexpr int W = 4;
#if defined(__aarch64__)
constexpr int NUM_REGISTERS = 32;
#else
constexpr int NUM_REGISTERS = 16;
#endif
#endif

typedef float vf __attribute__((vector_size(4 * W), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

ALLM_INLINE vf load(const float* p) { return *(const vf_unaligned*)p; }
ALLM_INLINE void store(float* p, vf v) { *(vf_unaligned*)p = v; }
ALLM_INLINE vf broadcast(float x) {
#if ALLM_AVX512
    return _mm512_set1_ps(x);
#elif ALLM_AVX2
    return _mm256_set1_ps(x);
#else
    return vf{x, x, x, x};
#endif
}
ALLM_INLINE vi broadcast_int(int32_t x) { return (vi)broadcast(__builtin_bit_cast(float, x)); }
ALLM_INLINE vf zero() { return broadcast(0.0f); }

ALLM_INLINE vf fma(vf a, vf b, vf c) {  // a * b + c, rounded once where the machine can
#if ALLM_AVX512
    return _mm512_fmadd_ps(a, b, c);
#elif ALLM_AVX2
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
ALLM_INLINE float fma(float a, float b, float c) {
#if ALLM_AVX512 || ALLM_AVX2 || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

ALLM_INLINE vf max(vf a, vf b) {  // b where either is NaN, as x86 does
#if ALLM_AVX512
    return _mm512_max_ps(a, b);
#elif ALLM_AVX2
    return _mm256_max_ps(a, b);
#else
    return (vf)(((vi)a & (vi)(a > b)) | ((vi)b & ~(vi)(a > b)));
#endif
}
ALLM_INLINE vf min(vf a, vf b) { return -max(-a, -b); }  // b where either is NaN

// where(mask, a, b): mask lanes are all ones or all zeros
ALLM_INLINE vf where(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

ALLM_INLINE bool any(vi mask) {  // of lanes that are all ones or all zeros
#if ALLM_AVX512
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif ALLM_AVX2
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

ALLM_INLINE vi lane_index() {
#if ALLM_AVX512
    return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif ALLM_AVX2
    return vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
    return vi{0, 1, 2, 3};
#endif
}

// ---- conversions to fp32 -----------------------------------------------------------------------------------------

ALLM_INLINE float from_bf16(uint16_t x) { return __builtin_bit_cast(float, (uint32_t)x << 16); }
ALLM_INLINE uint16_t to_bf16(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);  // NaN stays NaN
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

ALLM_INLINE float from_f16(uint16_t h) {
#if ALLM_AVX512 || ALLM_AVX2
    return _cvtsh_ss(h);
#else
    // Shift the fields into place and correct the exponent by a multiplication, which also makes subnormals right.
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    if ((h & 0x7c00) == 0x7c00) return __builtin_bit_cast(float, sign | rest | 0x7f800000u);
    float scaled = __builtin_bit_cast(float, rest) * 0x1p112f;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, scaled));
#endif
}
ALLM_INLINE uint16_t to_f16(float x) {
#if ALLM_AVX512 || ALLM_AVX2
    return (uint16_t)_cvtss_sh(x, 0);
#else
    uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 lets the hardware round at the right bit
        float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
        return (uint16_t)(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000u));
    }
    magnitude += 0xc8000fffu + ((magnitude >> 13) & 1);  // rebias the exponent, round half to even
    return (uint16_t)(sign | (magnitude >> 13));
#endif
}

ALLM_INLINE vf load_bf16(const uint16_t* p) {
#if ALLM_AVX512
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif ALLM_AVX2
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    return vf{from_bf16(p[0]), from_bf16(p[1]), from_bf16(p[2]), from_bf16(p[3])};
#endif
}
ALLM_INLINE vf load_f16(const uint16_t* p) {
#if ALLM_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif ALLM_AVX2
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return vf{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])};
#endif
}
ALLM_INLINE vf load_i8(const int8_t* p) {
#if ALLM_AVX512
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif ALLM_AVX2
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
#endif
}
// W bytes -> the low nibbles and the high nibbles as floats
ALLM_INLINE void load_nibbles(const uint8_t* p, vf& low, vf& high) {
#if ALLM_AVX512
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    low = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
    high = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
#elif ALLM_AVX2
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
    low = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(15)));
    high = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
#else
    low = vf{(float)(p[0] & 15), (float)(p[1] & 15), (float)(p[2] & 15), (float)(p[3] & 15)};
    high = vf{(float)(p[0] >> 4), (float)(p[1] >> 4), (float)(p[2] >> 4), (float)(p[3] >> 4)};
#endif
}

// ---- exp ---------------------------------------------------------------------------------------------------------

// e^x within about 1 ulp for -87.3 <= x <= 88.3 and for NaN; anything outside. Cephes' expf.
ALLM_INLINE vf exp_inside(vf x) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
    const vf magic = broadcast(12582912.0f);
    vf shifted = fma(x, broadcast(1.44269504f), magic);
    vf n = shifted - magic;
    x = fma(n, broadcast(-0.693359375f), x);
    x = fma(n, broadcast(2.12194440e-4f), x);
    vf p = broadcast(1.9875691500e-4f);
    p = fma(p, x, broadcast(1.3981999507e-3f));
    p = fma(p, x, broadcast(8.3334519073e-3f));
    p = fma(p, x, broadcast(4.1665795894e-2f));
    p = fma(p, x, broadcast(1.6666665459e-1f));
    p = fma(p, x, broadcast(5.0000001201e-1f));
    p = fma(p, x * x, x + broadcast(1.0f));
    return p * (vf)(((vu)shifted << 23) + 0x3f800000u);  // unsigned: what lies outside may wrap
}
// e^x; below -87.3 it stays at the smallest normal number, above 88.3 at the largest.
ALLM_INLINE vf exp(vf x) { return exp_inside(min(broadcast(88.3f), max(broadcast(-87.3f), x))); }  // this order keeps NaN
// e^x for x <= 0 and for NaN; below -87.3 it is 0.
ALLM_INLINE vf exp_or_zero(vf x) { return (vf)((vi)exp_inside(x) & ~(vi)(x <= broadcast(-87.3f))); }
ALLM_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// ---- reductions over 16 virtual lanes, the same for every W --------------------------------------------------------

constexpr int LANES = 16;
constexpr int PARTS = LANES / W;

struct Lanes {  // element i of a row belongs to lane i % 16
    vf part[PARTS];
};
ALLM_INLINE Lanes lanes(float x) {
    Lanes result;
    for (int i = 0; i < PARTS; i++) result.part[i] = broadcast(x);
    return result;
}

typedef float vf4 __attribute__((vector_size(16), may_alias));
typedef float vf8 __attribute__((vector_size(32), may_alias));

// Folds 16 -> 8 -> 4 -> 2 -> 1: lane i with lane i + half.
template <class Operation>
ALLM_INLINE float fold(const Lanes& v, Operation&& operation) {
#if ALLM_AVX512 || ALLM_AVX2
#if ALLM_AVX512
    vf8 eight = operation((vf8)_mm512_castps512_ps256(v.part[0]), (vf8)_mm512_extractf32x8_ps(v.part[0], 1));
#else
    vf8 eight = operation((vf8)v.part[0], (vf8)v.part[1]);
#endif
    vf4 four = operation((vf4)_mm256_castps256_ps128(eight), (vf4)_mm256_extractf128_ps(eight, 1));
#else
    vf4 four = operation(operation(v.part[0], v.part[2]), operation(v.part[1], v.part[3]));
#endif
    return operation(operation(four[0], four[2]), operation(four[1], four[3]));
}
ALLM_INLINE float sum(const Lanes& v) {
    return fold(v, [](auto a, auto b) ALLM_LAMBDA_INLINE { return a + b; });
}
ALLM_INLINE float max(const Lanes& v) {
    return fold(v, [](auto a, auto b) ALLM_LAMBDA_INLINE { return a > b ? a : b; });
}

template <class T>
constexpr T smaller(T a, T b) { return a < b ? a : b; }
template <class T>
constexpr T larger(T a, T b) { return a < b ? b : a; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace allm
