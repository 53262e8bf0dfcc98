// Draw one token per row of logits: temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution at
// the row's number, which is a function of (seed, sample index, position) alone. A row's token depends on that row only.
//
// Order of the tokens along the cumulative distribution: by id where nothing has to be ranked, else by logit, the greatest
// first and the lower id of equals first. Every filter keeps a beginning of the ranking, so none needs it as a whole: tokens
// are put into bins by their distance from the greatest logit, and only the few bins in which a filter cuts or the number
// falls are sorted. A token's weight is e^-distance; beyond FARTHEST it is 0 and the token is never drawn.
#include <math.h>
#include <stdint.h>

#include <algorithm>

#include "asyncllm_kernels.h"
#include "simd.h"
#include "threads.h"

namespace allm {
namespace {

constexpr int32_t BINS = 2048;
constexpr float FARTHEST = 87.0f;  // e^-87 is just a normal number
constexpr float BINS_PER_UNIT = BINS / FARTHEST;

// ---- numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) -----------------

double uniform(uint64_t seed, uint32_t sample_index, uint64_t position) {
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), sample_index, 0};
    uint32_t k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
    }
    return (double)((uint64_t)c[0] << 21 | c[1] >> 11) * 0x1p-53;
}

// ---- the greatest logit ---------------------------------------------------------------------------------------------

struct Greatest {
    float value;
    int64_t column;
};

// As torch.argmax: the first of equals; a NaN is greater than everything.
Greatest greatest(const float* logits, int64_t n) {
    const int64_t whole = n / W * W;
    vf top = broadcast(-INFINITY);
    vi nan = broadcast_int(0);
    for (int64_t i = 0; i < whole; i += W) {
        vf v = load(logits + i);
        top = max(v, top);
        nan |= (vi)(v != v);
    }
    bool has_nan = any(nan);
    float value = -INFINITY;
    for (int j = 0; j < W; j++) value = larger(value, top[j]);
    for (int64_t i = whole; i < n; i++) {
        has_nan |= logits[i] != logits[i];
        value = larger(value, logits[i]);
    }
    auto found = [&](float x) { return has_nan ? x != x : x == value; };
    int64_t column = 0;
    if (!has_nan)
        while (column < whole && !any((vi)(load(logits + column) == broadcast(value)))) column += W;
    while (column < n - 1 && !found(logits[column])) column++;
    return {has_nan ? (float)NAN : value, column};
}

// ---- weights --------------------------------------------------------------------------------------------------------

struct Candidate {
    float distance;
    int32_t column;
};

// The scratch memory of one thread: arrays over the vocabulary, rounded up to whole lines of 16 columns.
struct Scratch {
    double* mass;    // [BINS + 1]; the last one takes what has no weight
    int32_t* count;  // [BINS + 1]
    float *distance, *weight;
    int32_t* bin;
    Candidate* candidates;

    static int64_t columns(int64_t vocabulary) { return round_up(vocabulary, LANES); }
    static size_t bytes(int64_t vocabulary) {
        return (BINS + 16) * (sizeof(double) + sizeof(int32_t)) +
               columns(vocabulary) * (2 * sizeof(float) + sizeof(int32_t) + sizeof(Candidate));
    }
    Scratch(uint8_t* memory, int64_t vocabulary) {
        mass = (double*)memory;
        count = (int32_t*)(mass + BINS + 16);
        distance = (float*)(count + BINS + 16);
        weight = distance + columns(vocabulary);
        bin = (int32_t*)(weight + columns(vocabulary));
        candidates = (Candidate*)(bin + columns(vocabulary));
    }
};

struct Row {
    const float* logits;
    int64_t vocabulary;
    const allm_sampling& sampling;
    float top;  // the greatest logit
    double number;
};

// Fill weight, and with RANKED distance and bin, up to a whole number of lines. A weight below `least` becomes 0.
template <bool RANKED>
void weigh(const Row& row, float least, Scratch& scratch) {
    const vf temperature = broadcast(row.sampling.temperature), top = broadcast(row.top / row.sampling.temperature);
    auto line = [&](const float* logits, int64_t at) ALLM_LAMBDA_INLINE {
        for (int part = 0; part < PARTS; part++, at += W) {
            vf distance = top - load(logits + part * W) / temperature;
            vi near = (vi)(distance < broadcast(FARTHEST));
            vf weight = exp(-distance);
            store(scratch.weight + at, where(near & (vi)(weight >= broadcast(least)), weight, zero()));
            if (!RANKED) continue;
            distance = where(near, distance, broadcast(FARTHEST));
            store(scratch.distance + at, distance);
            vi bin = __builtin_convertvector(distance * broadcast(BINS_PER_UNIT), vi);
            store((float*)scratch.bin + at, (vf)bin);
        }
    };
    int64_t i = 0;
    for (; i + LANES <= row.vocabulary; i += LANES) line(row.logits + i, i);
    if (i == row.vocabulary) return;
    float rest[LANES];
    for (int j = 0; j < LANES; j++) rest[j] = i + j < row.vocabulary ? row.logits[i + j] : -INFINITY;
    line(rest, i);
}

// What the cumulative sum must exceed. Less than `total` even if rounding says otherwise: so some token is always found.
double target_of(double number, double total) { return smaller(number * total, nextafter(total, 0.0)); }

// ---- by id: neither top-k nor top-p ---------------------------------------------------------------------------------

constexpr int64_t SPAN = 256;  // columns that are summed at once

double sum_of(const float* weights, int64_t count) {
    Lanes total = lanes(0.0f);
    for (int64_t i = 0; i < count; i += LANES)
        for (int part = 0; part < PARTS; part++) total.part[part] += load(weights + i + part * W);
    return sum(total);
}

int64_t draw_by_id(const Row& row, Scratch& scratch) {
    weigh<false>(row, row.sampling.min_p, scratch);
    const int64_t columns = Scratch::columns(row.vocabulary);
    auto span = [&](int64_t first) { return sum_of(scratch.weight + first, smaller(SPAN, columns - first)); };
    double total = 0.0;
    for (int64_t i = 0; i < columns; i += SPAN) total += span(i);
    const double target = target_of(row.number, total);
    double before = 0.0;
    int64_t first = 0;
    for (double next; first + SPAN < columns && (next = before + span(first)) <= target; first += SPAN) before = next;
    int64_t last = first;  // the last token with a weight, should rounding leave none beyond the target
    for (int64_t i = first; i < smaller(first + SPAN, columns); i++) {
        if (scratch.weight[i] == 0.0f) continue;
        last = i;
        before += scratch.weight[i];
        if (before > target) break;
    }
    return last;
}

// ---- by rank --------------------------------------------------------------------------------------------------------

// What a filter keeps: all bins before `bin`, and the first `rank` tokens of it.
struct Cut {
    int32_t bin;
    int64_t rank;
};

class Ranking {
public:
    Ranking(const Row& row, Scratch& scratch) : row(row), scratch(scratch) {
        weigh<true>(row, 0.0f, scratch);
        memset(scratch.mass, 0, sizeof(double) * (BINS + 1));
        memset(scratch.count, 0, sizeof(int32_t) * (BINS + 1));
        for (int64_t i = 0; i < row.vocabulary; i++) {
            scratch.mass[scratch.bin[i]] += scratch.weight[i];
            scratch.count[scratch.bin[i]]++;
        }
    }

    int64_t draw() {
        keep_top_k();
        if (row.sampling.top_p < 1.0f) keep_top_p();
        if (row.sampling.min_p > 0.0f) keep_min_p();
        const double target = target_of(row.number, mass_before(cut.bin) + mass_in(cut));
        double before = 0.0;
        for (int32_t b = 0;; b++) {
            double next = before + (b < cut.bin ? scratch.mass[b] : mass_in(cut));
            if (next > target || b == cut.bin) return token_beyond(target, before, b);
            before = next;
        }
    }

private:
    const Row& row;
    Scratch& scratch;
    Cut cut{BINS, 0};
    int32_t sorted = -1;  // the bin whose tokens are in `candidates`

    // The tokens of a bin in the order of the ranking.
    const Candidate* tokens(int32_t bin) {
        if (bin == sorted) return scratch.candidates;
        sorted = bin;
        const int64_t columns = Scratch::columns(row.vocabulary);
        int64_t found = 0, wanted = scratch.count[bin];
        for (int64_t i = 0; i < columns && found < wanted; i += W) {
            if (!any((vi)load((const float*)scratch.bin + i) == broadcast_int(bin))) continue;
            for (int64_t j = i; j < i + W && j < row.vocabulary; j++)
                if (scratch.bin[j] == bin) scratch.candidates[found++] = {scratch.distance[j], (int32_t)j};
        }
        std::sort(scratch.candidates, scratch.candidates + found, [](const Candidate& a, const Candidate& b) {
            return a.distance != b.distance ? a.distance < b.distance : a.column < b.column;
        });
        return scratch.candidates;
    }

    float weight(const Candidate& token) const { return scratch.weight[token.column]; }
    int64_t kept(int32_t bin) const { return bin < cut.bin ? scratch.count[bin] : cut.rank; }

    double mass_before(int32_t bin) const {
        double total = 0.0;
        for (int32_t b = 0; b < bin; b++) total += scratch.mass[b];
        return total;
    }
    double mass_in(const Cut& part) {
        if (!part.rank) return 0.0;
        const Candidate* ranked = tokens(part.bin);
        double total = 0.0;
        for (int64_t r = 0; r < part.rank; r++) total += weight(ranked[r]);
        return total;
    }

    void keep_top_k() {
        int64_t left = row.sampling.top_k > 0 ? row.sampling.top_k : row.vocabulary;
        int32_t b = 0;
        while (b < BINS && scratch.count[b] < left) left -= scratch.count[b++];
        cut = {b, b < BINS ? left : 0};
    }

    // A token stays if the mass before it is less than top_p of the mass that top-k left.
    void keep_top_p() {
        const double wanted = (mass_before(cut.bin) + mass_in(cut)) * row.sampling.top_p;
        double before = 0.0;
        for (int32_t b = 0; b <= smaller(cut.bin, BINS - 1); before += scratch.mass[b++]) {
            if (before + scratch.mass[b] < wanted) continue;
            const Candidate* ranked = tokens(b);
            double mass = before;
            for (int64_t r = 0; r < kept(b); mass += weight(ranked[r++])) {
                if (mass < wanted) continue;
                cut = {b, r};
                return;
            }
        }
    }

    void keep_min_p() {
        const float least = row.sampling.min_p;
        const int32_t near = smaller((int32_t)smaller(-logf(least) * BINS_PER_UNIT, (float)BINS), BINS);
        for (int32_t b = larger(near - 1, 0); b <= smaller(cut.bin, smaller(near + 1, BINS - 1)); b++) {
            const Candidate* ranked = tokens(b);
            for (int64_t r = 0; r < kept(b); r++) {
                if (weight(ranked[r]) >= least) continue;
                cut = {b, r};
                return;
            }
        }
        if (near + 2 <= cut.bin) cut = {near + 2, 0};  // also where another filter cut inside that bin
    }

    int64_t token_beyond(double target, double before, int32_t bin) {
        const Candidate* ranked = tokens(bin);
        int64_t last = 0;
        for (int64_t r = 0; r < kept(bin); r++) {
            last = ranked[r].column;
            before += weight(ranked[r]);
            if (before > target) break;
        }
        return last;
    }
};

bool is_valid(const allm_sampling& sampling) {
    return sampling.temperature >= 0.0f && sampling.top_p > 0.0f && sampling.min_p >= 0.0f && sampling.top_k >= 0;
}

}  // namespace
}  // namespace allm

using namespace allm;

int32_t allm_draw_tokens(allm_pool* pool, const float* logits, int64_t logits_stride, int64_t vocabulary,
                         const allm_sampling* samplings, const int64_t* positions, int64_t* ids, float* best, int64_t rows) {
    if (vocabulary < 1 || vocabulary > INT32_MAX) return ALLM_BAD_ARGUMENT;
    for (int64_t r = 0; r < rows; r++)
        if (!is_valid(samplings[r])) return ALLM_BAD_ARGUMENT;
    auto draw = [&](int64_t r, uint8_t* memory) {
        const allm_sampling& sampling = samplings[r];
        Greatest top = greatest(logits + r * logits_stride, vocabulary);
        best[r] = top.value;
        ids[r] = top.column;
        // Also where the temperature is so low that the division overflows: all others are infinitely less likely.
        if (sampling.temperature == 0.0f || !(fabsf(top.value / sampling.temperature) < INFINITY)) return;
        Scratch scratch(memory, vocabulary);
        double number = uniform(sampling.seed, (uint32_t)sampling.sample_index, (uint64_t)positions[r]);
        Row row{logits + r * logits_stride, vocabulary, sampling, top.value, number};
        bool ranked = sampling.top_k > 0 || sampling.top_p < 1.0f;
        ids[r] = ranked ? Ranking(row, scratch).draw() : draw_by_id(row, scratch);
    };
    bool random = false;
    for (int64_t r = 0; r < rows; r++) random |= samplings[r].temperature > 0.0f;
    return parallel_for(pool, rows, random ? Scratch::bytes(vocabulary) : 0, draw);
}
