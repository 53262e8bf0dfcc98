// Quantizing one block of 32 weights. Sums over a block go through the 16 virtual lanes of simd.h: every instruction set
// chooses the same numbers.
#include "quantize_weights.h"

#include "simd_integer.h"

namespace allm {
namespace {

constexpr int VECTORS = WEIGHT_BLOCK / W;
constexpr float LEVELS = 15.0f;
constexpr int TRIALS = 21;  // as ggml's make_qkx2_quants is called: 15 levels over 0.933 … 1.067 of the range

struct Block {
    vf part[VECTORS];
};

// 0, or NaN where a number of the block is not finite: added to the scale, it keeps such a weight from looking like one.
float poison(const float* x) {
    float result = 0.0f;
    for (int i = 0; i < WEIGHT_BLOCK; i++) result += 0.0f * x[i];
    return result;
}

template <class Function>
ALLM_INLINE float sum_of(Function&& term) {
    Lanes total = lanes(0.0f);
    for (int i = 0; i < VECTORS; i++) total.part[i % PARTS] += term(i);
    return sum(total);
}

ALLM_INLINE vf round_to_level(vf x) {
    const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23
    return max(min(broadcast(LEVELS), (x + magic) - magic), zero());  // NaN becomes 0
}

struct Line {
    float scale, minimum;
};

// The numbers nearest to (x - minimum) / scale.
ALLM_INLINE void choose(const Block& x, Line line, Block& q) {
    float inverse = line.scale != 0.0f ? 1.0f / line.scale : 0.0f;
    for (int i = 0; i < VECTORS; i++) q.part[i] = round_to_level((x.part[i] - broadcast(line.minimum)) * broadcast(inverse));
}

ALLM_INLINE float squared_error(const Block& x, Line line, const Block& q) {
    return sum_of([&](int i) {
        vf error = broadcast(line.scale) * q.part[i] + broadcast(line.minimum) - x.part[i];
        return error * error;
    });
}

// Scale and minimum of least squared error for these numbers; the scale is 0 where they do not determine one.
ALLM_INLINE Line fit(const Block& x, const Block& q, float sum_x) {
    float sum_q = sum_of([&](int i) { return q.part[i]; });
    float sum_qq = sum_of([&](int i) { return q.part[i] * q.part[i]; });
    float sum_xq = sum_of([&](int i) { return x.part[i] * q.part[i]; });
    float determinant = WEIGHT_BLOCK * sum_qq - sum_q * sum_q;
    if (!(determinant > 0.0f)) return {0.0f, 0.0f};
    return {(WEIGHT_BLOCK * sum_xq - sum_x * sum_q) / determinant, (sum_qq * sum_x - sum_q * sum_xq) / determinant};
}

ALLM_INLINE Line in_f16(Line line) { return {from_f16(to_f16(line.scale)), from_f16(to_f16(line.minimum))}; }

void put_f16(uint8_t* p, float value) {
    uint16_t bits = to_f16(value);
    memcpy(p, &bits, sizeof(bits));
}

}  // namespace

void quantize_q8_0(const float* x, uint8_t* block) {
    float top = 0.0f;
    for (int i = 0; i < WEIGHT_BLOCK; i++) top = larger(top, fabsf(x[i]));
    float scale = top / 127.0f, inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    put_f16(block, scale + poison(x));
    for (int i = 0; i < WEIGHT_BLOCK; i++) {
        float number = x[i] * inverse, magnitude = smaller(127.0f, floorf(fabsf(number) + 0.5f));
        block[2 + i] = (uint8_t)(int8_t)(number < 0.0f ? -magnitude : magnitude);
    }
}

// Each trial chooses numbers by a scale near (greatest - least) / 15 and fits the line to them; what counts is the error
// with scale and minimum as they are stored, in fp16.
void quantize_q4_1(const float* values, uint8_t* block) {
    Block x;
    float least = values[0], greatest = values[0];
    for (int i = 0; i < VECTORS; i++) x.part[i] = load(values + i * W);
    for (int i = 1; i < WEIGHT_BLOCK; i++) {
        least = smaller(least, values[i]);
        greatest = larger(greatest, values[i]);
    }
    const float sum_x = sum_of([&](int i) { return x.part[i]; });
    Line best = in_f16({(greatest - least) / LEVELS, least});
    Block numbers;
    choose(x, best, numbers);
    float best_error = squared_error(x, best, numbers);
    for (int trial = 0; trial < TRIALS && greatest > least; trial++) {
        Block q;
        choose(x, {(greatest - least) / (LEVELS - 1.0f + 0.1f * (float)trial), least}, q);
        Line line = in_f16(fit(x, q, sum_x));
        if (line.scale == 0.0f) continue;
        choose(x, line, q);
        float error = squared_error(x, line, q);
        if (error < best_error) {
            best = line;
            best_error = error;
            numbers = q;
        }
    }
    put_f16(block, best.scale + poison(values));
    put_f16(block + 2, best.minimum);
    float q[WEIGHT_BLOCK];
    for (int i = 0; i < VECTORS; i++) store(q + i * W, numbers.part[i]);
    for (int i = 0; i < 16; i++) block[4 + i] = (uint8_t)((int)q[i] | (int)q[i + 16] << 4);
}

}  // namespace allm
