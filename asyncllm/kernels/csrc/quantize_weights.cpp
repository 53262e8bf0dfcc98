// Quantizing blocks of 32 weights, W of them side by side. Scales and minima come out as fp16 holds them.
//
// A weight that is not finite makes the scale of its block NaN: it does not turn into a number.
#include "quantize_weights.h"

#include "simd_integer.h"

namespace allm {
namespace {

constexpr float LEVELS = 15.0f;
constexpr int TRIALS = 21;  // ranges of 14 … 16 levels, as ggml's make_qkx2_quants is called

ALLM_INLINE vf in_f16(vf x) {
#if ALLM_AVX512
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif ALLM_AVX2
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < W; i++) x[i] = from_f16(to_f16(x[i]));
    return x;
#endif
}

ALLM_INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

// 0, or NaN where a weight of the block is not finite
vf poison(const WeightBlocks& blocks) {
    vf result = zero();
    for (int i = 0; i < WEIGHT_BLOCK; i++) result += zero() * blocks.x[i];
    return result;
}

struct Line {
    vf scale, minimum;
};

// The level nearest to (x - minimum) / scale; NaN becomes 0.
ALLM_INLINE vf level(vf x, vf minimum, vf inverse) {
    const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23
    vf rounded = ((x - minimum) * inverse + magic) - magic;
    return max(min(broadcast(LEVELS), rounded), zero());
}

ALLM_INLINE vf inverse_or_zero(vf x) { return where((vi)(x != zero()), broadcast(1.0f) / x, zero()); }

// Scale and minimum of least squared error for the levels that `line` chooses; where these are all the same: `line`.
Line fit(const WeightBlocks& blocks, const Line& line) {
    vf inverse = inverse_or_zero(line.scale), sum_q = zero(), sum_qq = zero(), sum_x = zero(), sum_xq = zero();
    for (int i = 0; i < WEIGHT_BLOCK; i++) {
        vf x = blocks.x[i], q = level(x, line.minimum, inverse);
        sum_q += q;
        sum_qq += q * q;
        sum_x += x;
        sum_xq += x * q;
    }
    vf determinant = broadcast(WEIGHT_BLOCK) * sum_qq - sum_q * sum_q;
    vi usable = (vi)(determinant > zero());
    vf scale = (broadcast(WEIGHT_BLOCK) * sum_xq - sum_x * sum_q) / determinant;
    vf minimum = (sum_qq * sum_x - sum_q * sum_xq) / determinant;
    return {where(usable, scale, line.scale), where(usable, minimum, line.minimum)};
}

vf squared_error(const WeightBlocks& blocks, const Line& line) {
    vf inverse = inverse_or_zero(line.scale), total = zero();
    for (int i = 0; i < WEIGHT_BLOCK; i++) {
        vf x = blocks.x[i], error = line.scale * level(x, line.minimum, inverse) + line.minimum - x;
        total += error * error;
    }
    return total;
}

}  // namespace

void quantize_8_bits(WeightBlocks& blocks) {
    vf top = zero();
    for (int i = 0; i < WEIGHT_BLOCK; i++) top = max(top, magnitude(blocks.x[i]));
    vf scale = top / broadcast(127.0f), inverse = inverse_or_zero(scale);
    blocks.scale = in_f16(scale) + poison(blocks);
    blocks.minimum = zero();
    for (int i = 0; i < WEIGHT_BLOCK; i++) {
        vf number = blocks.x[i] * inverse;
        vf away = max(min(broadcast(127.0f), magnitude(number) + broadcast(0.5f)), zero());  // NaN becomes 0
        vf whole = to_float(__builtin_convertvector(away, vi));
        blocks.numbers[i] = (vf)((vi)whole | ((vi)number & (int32_t)0x80000000));
    }
}

// Each trial chooses levels by a scale near (greatest - least) / 15 and fits a line to them; what counts is the error with
// scale and minimum as they are stored.
void quantize_4_bits(WeightBlocks& blocks) {
    vf least = blocks.x[0], greatest = blocks.x[0];
    for (int i = 1; i < WEIGHT_BLOCK; i++) {
        least = min(least, blocks.x[i]);
        greatest = max(greatest, blocks.x[i]);
    }
    vf range = greatest - least;
    Line best{in_f16(range / broadcast(LEVELS)), in_f16(least)};
    vf best_error = squared_error(blocks, best);
    for (int trial = 0; trial < TRIALS; trial++) {
        Line line = fit(blocks, {range / broadcast(LEVELS - 1.0f + 0.1f * (float)trial), least});
        line = {in_f16(line.scale), in_f16(line.minimum)};
        vf error = squared_error(blocks, line);
        vi better = (vi)(error < best_error);
        best = {where(better, line.scale, best.scale), where(better, line.minimum, best.minimum)};
        best_error = where(better, error, best_error);
    }
    blocks.scale = best.scale + poison(blocks);
    blocks.minimum = best.minimum;
    vf inverse = inverse_or_zero(best.scale);
    for (int i = 0; i < WEIGHT_BLOCK; i++) blocks.numbers[i] = level(blocks.x[i], best.minimum, inverse);
}

}  // namespace allm
