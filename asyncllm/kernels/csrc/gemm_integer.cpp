// Matrix products in integers: weights of 4 to 8 bits times activations of 16 bits.
//
// Within a group of 32 k (or 16) the sum of products is an exact 32-bit integer: |q| <= 128, |x| <= 32767. Then
// y = fma(float(sum), weight factor * activation scale, y), and y = fma(minimum, scale * sum of x, y) where the format has
// minima, group after group in the order of k. So an output depends on nothing but its own row and column: not on the
// shape of a tile, on threads, on which instructions add the integers or, where there is a fused multiply-add, on the
// instruction set.
//
// A tile is R rows of x times N panels: its R * N * 2 integer accumulators stay in registers while the pairs of a group
// run by; the fp32 sums wait in memory meanwhile, and are touched once per group.
#include "gemm_integer.h"

namespace allm {
namespace {

constexpr int MAX_ROWS = NUM_REGISTERS == 32 ? 12 : 6;  // two accumulators each, two widened weights and one pair of x
constexpr int MAX_PANELS = 4;
constexpr int KC = 1024;        // k after which many rows go on with the next ones: their panels stay in the cache
constexpr int AHEAD = 4096;     // bytes of a panel to prefetch ahead

// The formats of quantization="int8" and "int4". The others have fewer tiles; for more rows their panels are widened first.
template <class Format>
constexpr bool is_main = !Format::WIDE && (Format::NIBBLES ? Format::MINIMA : !Format::MINIMA) && Format::Head::HEAD < 8 * P &&
                         Format::BLOCK == GROUP;

template <class Format>
constexpr int max_rows() {
    return is_main<Format> || Format::WIDE ? MAX_ROWS : 4;
}

// Rows from which on widening a panel once pays. Measured: nibbles gain 3 to 8 % on AVX2 from 16 rows on, bytes 2 % there
// from 48 on; on AVX-512 both lose a tenth, since widening on the way costs nothing and half the bytes are read.
template <class Format>
constexpr int widen_rows() {
    if (!is_main<Format>) return max_rows<Format>() + 1;
    return NUM_REGISTERS == 16 && Format::NIBBLES ? 16 : 1 << 30;
}

// How many panels a tile of this many rows takes. With 16 registers nibbles need one or two more, for a mask and an offset.
template <class Format>
constexpr int panels_for(int rows) {
    if (Format::WIDE) return 1;
    int most = is_main<Format> ? MAX_PANELS : 2;
    bool few = NUM_REGISTERS == 16 && (!is_main<Format> || (Format::NIBBLES && rows == 2));
    int panels = (few ? 4 : MAX_ROWS) / rows;
    return panels > most ? most : panels < 1 ? 1 : panels;
}

// Rows of x from one group on.
struct Rows {
    const int16_t* values;
    const GroupFactors* factors;
    int64_t groups;  // of a whole row: its stride
};

using Tile = void (*)(const Rows& x, const uint8_t* weight, int64_t panel_stride, float* y, int64_t y_stride,
                      int64_t groups, bool accumulate);

template <int BYTES>
ALLM_INLINE void prefetch(const uint8_t* p) {
    for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(p + line);
}

template <class Format, int R, int N, bool FUSED>
ALLM_NOINLINE void integer_tile(const Rows& rows, const uint8_t* weight, int64_t panel_stride, float* y, int64_t y_stride,
                                int64_t groups, bool accumulate) {
    constexpr int PARTS = GROUP / Format::BLOCK;
    alignas(64) float sums[R][2 * N * W];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 2 * N; j++) store(sums[r] + j * W, accumulate ? load(y + r * y_stride + j * W) : zero());
    const int16_t* x = rows.values;
    const int64_t x_stride = rows.groups * GROUP;
    for (int64_t b = 0; b < groups * PARTS; b++, weight += Format::BYTES, x += Format::BLOCK) {
        vi sum[R][2 * N];
        unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
            unroll<2 * N>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][j] = broadcast_int(0); });
        });
#pragma GCC unroll 1
        for (int i = 0; i < Format::BLOCK / 2; i++) {
            unroll<N>([&](auto n) ALLM_LAMBDA_INLINE {
                vh low, high;
                if constexpr (!Format::WIDE) prefetch<Format::PAIR>(weight + n * panel_stride + i * Format::PAIR + AHEAD);
                Format::pairs(weight + n * panel_stride, i, low, high);
                unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                    vh pair = broadcast_pair(x + r * x_stride + 2 * i);
                    sum[r][2 * n] = dot<FUSED>(pair, low, sum[r][2 * n]);
                    sum[r][2 * n + 1] = dot<FUSED>(pair, high, sum[r][2 * n + 1]);
                });
                forget_memory();
            });
        }
        unroll<2 * N>([&](auto j) ALLM_LAMBDA_INLINE {
            const uint8_t* block = weight + j / 2 * panel_stride;
            vf factor = Format::factors(block, j % 2), minimum;
            if constexpr (Format::MINIMA) minimum = Format::minima(block, j % 2);
            unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                const GroupFactors& own = rows.factors[r * rows.groups + b / PARTS];
                vf total = fma(to_float(sum[r][j]), factor * broadcast(own.scale), load(sums[r] + j * W));
                if constexpr (Format::MINIMA)
                    total = fma(minimum, broadcast(PARTS == 1 ? own.sum : own.half_sums[b % PARTS]), total);
                store(sums[r] + j * W, total);
            });
        });
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 2 * N; j++) store(y + r * y_stride + j * W, load(sums[r] + j * W));
}

template <class Format, int R, int N, bool FUSED>
constexpr Tile tile_or_null() {
    if constexpr (R <= max_rows<Format>() && N <= panels_for<Format>(R)) return integer_tile<Format, R, N, FUSED>;
    else return nullptr;
}

// tiles<Format, FUSED>[rows - 1][panels - 1]
#define ALLM_TILE_ROW(R)                                                          \
    {tile_or_null<Format, R, 1, FUSED>(), tile_or_null<Format, R, 2, FUSED>(),    \
     tile_or_null<Format, R, 3, FUSED>(), tile_or_null<Format, R, 4, FUSED>()}
template <class Format, bool FUSED>
constexpr Tile tiles[MAX_ROWS][MAX_PANELS] = {
    ALLM_TILE_ROW(1), ALLM_TILE_ROW(2), ALLM_TILE_ROW(3), ALLM_TILE_ROW(4),  ALLM_TILE_ROW(5),  ALLM_TILE_ROW(6),
#if defined(ALLM_AVX512) || defined(__aarch64__)
    ALLM_TILE_ROW(7), ALLM_TILE_ROW(8), ALLM_TILE_ROW(9), ALLM_TILE_ROW(10), ALLM_TILE_ROW(11), ALLM_TILE_ROW(12),
#endif
};
#undef ALLM_TILE_ROW

// A weight's panels from one group on.
struct Panels {
    const uint8_t* weight;
    int64_t stride;  // bytes from panel to panel
    int64_t count;
    int64_t groups;
};

template <class Format>
ALLM_INLINE Tile tile_for(int64_t rows, int64_t panels) {
#if ALLM_AVX512 || ALLM_AVX2
    if (has_fused_dot()) return tiles<Format, true>[rows - 1][panels - 1];
#endif
    return tiles<Format, false>[rows - 1][panels - 1];
}

// One tile of rows (<= MAX_ROWS) times all panels, in runs of about equal width.
template <class Format>
void sweep(const Rows& x, int64_t rows, const Panels& panels, float* y, int64_t y_stride, bool accumulate) {
    int64_t runs = ceil_div(panels.count, panels_for<Format>((int)rows));
    for (int64_t g = 0, done = 0; g < runs; g++) {
        int64_t end = panels.count * (g + 1) / runs;
        tile_for<Format>(rows, end - done)(x, panels.weight + done * panels.stride, panels.stride, y + done * P, y_stride,
                                           panels.groups, accumulate);
        done = end;
    }
}

// How many of the remaining rows the next tile takes: tiles of about equal height.
template <class Format>
ALLM_INLINE int64_t tile_rows(int64_t remaining) {
    return ceil_div(remaining, ceil_div(remaining, max_rows<Format>()));
}

template <class Format>
void all_rows(const Rows& x, int64_t rows, const Panels& panels, float* y, int64_t y_stride, bool accumulate) {
    for (int64_t done = 0, height; done < rows; done += height) {
        height = tile_rows<Format>(rows - done);
        Rows part{x.values + done * x.groups * GROUP, x.factors + done * x.groups, x.groups};
        sweep<Format>(part, height, panels, y + done * y_stride, y_stride, accumulate);
    }
}

// Panels of KC k are used by one tile of rows after the other from the cache.
template <class Format>
void many_rows(const Rows& x, int64_t rows, const Panels& panels, float* y, int64_t y_stride) {
    const int64_t width = rows <= 2 * MAX_ROWS ? MAX_PANELS : 1;  // tiles of few rows take several panels
    for (int64_t g = 0; g < panels.groups; g += KC / GROUP) {
        Rows from{x.values + g * GROUP, x.factors + g, x.groups};
        for (int64_t p = 0; p < panels.count; p += width) {
            const uint8_t* weight = panels.weight + p * panels.stride + panel_bytes<Format>(g * GROUP);
            Panels part{weight, panels.stride, smaller(width, panels.count - p), smaller<int64_t>(KC / GROUP, panels.groups - g)};
            all_rows<Format>(from, rows, part, y + p * P, y_stride, g > 0);
        }
    }
}

// The same with each panel widened first.
template <class Format>
void many_rows_widened(const Rows& x, int64_t rows, const Panels& panels, float* y, int64_t y_stride, uint8_t* wide) {
    using Wide = WideBlocks<Format::MINIMA, Format::BLOCK>;
    for (int64_t g = 0; g < panels.groups; g += INTEGER_KC / GROUP) {
        Rows from{x.values + g * GROUP, x.factors + g, x.groups};
        int64_t groups = smaller<int64_t>(INTEGER_KC / GROUP, panels.groups - g);
        for (int64_t p = 0; p < panels.count; p++) {
            const uint8_t* weight = panels.weight + p * panels.stride + panel_bytes<Format>(g * GROUP);
            for (int64_t b = 0; b < groups * GROUP / Format::BLOCK; b++)
                Wide::template expand<Format>(weight + b * Format::BYTES, wide + b * Wide::BYTES);
            all_rows<Wide>(from, rows, Panels{wide, 0, 1, groups}, y + p * P, y_stride, g > 0);
        }
    }
}

}  // namespace

void multiply_integers(const QuantizedRows& x, int64_t first_row, int64_t rows, const allm_linear& linear,
                       int64_t first_panel, int64_t count, float* y, int64_t y_stride, IntegerScratch* scratch) {
    Rows from{x.values + first_row * x.groups * GROUP, x.factors + first_row * x.groups, x.groups};
    with_integer_format(linear.format, [&](auto f) {
        using Format = typename decltype(f)::Panel;
        int64_t stride = panel_bytes<Format>(x.groups * GROUP);
        Panels panels{(const uint8_t*)linear.weight + first_panel * stride, stride, count, x.groups};
        if (rows <= max_rows<Format>()) sweep<Format>(from, rows, panels, y, y_stride, false);
        else if (rows < widen_rows<Format>()) many_rows<Format>(from, rows, panels, y, y_stride);
        else many_rows_widened<Format>(from, rows, panels, y, y_stride, scratch->panel);
    });
}

}  // namespace allm
