// Matrix products x @ weight.T over packed panels: one micro-kernel per storage format and tile shape.
//
// A tile is R rows of x times N panels. Its R * N * 2 accumulators stay in registers while k runs from 0 to K - 1, one
// accumulator per output, so an output is the same chain of fused multiply-adds whatever R and N are: results do not
// depend on the number of rows, on threads or on the vector width. Where K is cut (long rows, many of them), the
// accumulators go to y and come back as they were.
//
// Few rows (decode): a tile covers all of them, N panels wide, and weights stream past once; bandwidth is the limit.
// Many rows (prefill): panels of KC k are used by one tile of rows after the other from the cache; for many tiles quantized
// panels are expanded to fp32 first. The multiply-add units are the limit.
#include "gemm.h"

#include <stdlib.h>

#include "gemm_integer.h"

namespace allm {
namespace {

constexpr int MAX_ROWS = NUM_REGISTERS == 32 ? 12 : 6;  // two accumulators each, and room for weights and one x
constexpr int MAX_PANELS = 4;
constexpr int KC = 1024;
constexpr int EXPAND_TILES = 8;  // tiles of rows from which on expanding a quantized panel to fp32 pays
constexpr int AHEAD = 4096;      // bytes of a panel to prefetch ahead: doubles the speed at 8 rows, a tenth at 512
constexpr int ROW_BLOCK = 96;  // rows that one task takes: x of this many rows and KC stays in the second-level cache
constexpr int PANEL_GROUP = 8;  // panels whose second operand (gate, logits) waits in scratch memory

// How many panels a tile of this many rows takes: as many accumulators as fit, at least 8 in flight for few rows. A
// quantized format needs registers for its constants.
template <class Format>
constexpr int panels_for(int rows) {
    int panels = (Format::QUANTIZED && NUM_REGISTERS == 16 ? 4 : MAX_ROWS) / rows;
    return panels > MAX_PANELS ? MAX_PANELS : panels < 1 ? 1 : panels;
}

using Tile = void (*)(const float* x, int64_t x_stride, const uint8_t* weight, int64_t panel_stride, float* y,
                      int64_t y_stride, int64_t k, bool accumulate);

template <int BYTES>
ALLM_INLINE void prefetch(const uint8_t* p) {
    for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(p + line);
}

template <class Format, int R, int N>
ALLM_NOINLINE void tile(const float* x, int64_t x_stride, const uint8_t* weight, int64_t panel_stride, float* y,
                        int64_t y_stride, int64_t k, bool accumulate) {
    constexpr int BYTES = Format::BYTES / Format::BLOCK;  // of one k
    vf sum[R][2 * N];
    auto for_each_sum = [&](auto&& body) ALLM_LAMBDA_INLINE {
        unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { unroll<2 * N>([&](auto j) ALLM_LAMBDA_INLINE { body(r, j); }); });
    };
    for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { sum[r][j] = zero(); });
    if (accumulate) for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { sum[r][j] = load(y + r * y_stride + j * W); });
    for (int64_t b = 0; b < k / Format::BLOCK; b++) {
        typename Format::Scales scales[N];
        unroll<N>([&](auto n) ALLM_LAMBDA_INLINE { scales[n] = Format::scales(weight + n * panel_stride); });
        for (int i = 0; i < Format::BLOCK; i++) {
            unroll<N>([&](auto n) ALLM_LAMBDA_INLINE {
                vf low, high;
                prefetch<BYTES>(weight + n * panel_stride + i * BYTES + AHEAD);
                Format::weights(weight + n * panel_stride, scales[n], i, low, high);
                unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                    vf value = broadcast(x[r * x_stride + i]);
                    sum[r][2 * n] = fma(value, low, sum[r][2 * n]);
                    sum[r][2 * n + 1] = fma(value, high, sum[r][2 * n + 1]);
                });
                forget_memory();
            });
        }
        weight += Format::BYTES;
        x += Format::BLOCK;
    }
    for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { store(y + r * y_stride + j * W, sum[r][j]); });
}

template <class Format, int R, int N>
constexpr Tile tile_or_null() {
    if constexpr (N <= panels_for<Format>(R)) return tile<Format, R, N>;
    else return nullptr;
}

// tiles<Format>[rows - 1][panels - 1]
#define ALLM_TILE_ROW(R) \
    {tile_or_null<Format, R, 1>(), tile_or_null<Format, R, 2>(), tile_or_null<Format, R, 3>(), tile_or_null<Format, R, 4>()}
template <class Format>
constexpr Tile tiles[MAX_ROWS][MAX_PANELS] = {
    ALLM_TILE_ROW(1),  ALLM_TILE_ROW(2),  ALLM_TILE_ROW(3),  ALLM_TILE_ROW(4), ALLM_TILE_ROW(5), ALLM_TILE_ROW(6),
#if defined(ALLM_AVX512) || defined(__aarch64__)
    ALLM_TILE_ROW(7),  ALLM_TILE_ROW(8),  ALLM_TILE_ROW(9),  ALLM_TILE_ROW(10), ALLM_TILE_ROW(11), ALLM_TILE_ROW(12),
#endif
};
#undef ALLM_TILE_ROW

struct Operand {  // the rows of x that a task works on
    const float* x;
    int64_t stride;
    int64_t rows;  // <= ROW_BLOCK
    int64_t k;
    int64_t first;  // its first row among all
    const QuantizedRows* quantized;  // all rows, where a weight is multiplied in integers
};

// The scratch memory of one thread.
struct Scratch {
    float panel[KC * P];                           // a quantized panel as fp32
    float edge[ROW_BLOCK * P];                     // the last panel of a weight whose N is no multiple of P
    float second[ROW_BLOCK * PANEL_GROUP * P];     // gate products or logits that are reduced at once
    IntegerScratch integer;
};

// A weight's panels from one k on.
struct Panels {
    const uint8_t* weight;
    int64_t stride;  // bytes from panel to panel
    int64_t count;
    int64_t k;
};

// One tile of rows (<= MAX_ROWS) times all panels, in groups of about equal width.
template <class Format>
void sweep(const float* x, int64_t x_stride, int64_t rows, const Panels& panels, float* y, int64_t y_stride, bool accumulate) {
    int64_t groups = ceil_div(panels.count, panels_for<Format>((int)rows));
    for (int64_t g = 0, done = 0; g < groups; g++) {
        int64_t end = panels.count * (g + 1) / groups;
        tiles<Format>[rows - 1][end - done - 1](x, x_stride, panels.weight + done * panels.stride, panels.stride, y + done * P,
                                                y_stride, panels.k, accumulate);
        done = end;
    }
}

// How many of the remaining rows the next tile takes. With 12 rows at most: equal heights, 13 are 7 + 6. With 6 at most:
// sixes, and at the end never a tile of 1 or 4, whose few accumulators wait for each other: 7 are 5 + 2, 8 are 6 + 2.
ALLM_INLINE int64_t tile_rows(int64_t remaining) {
    if (remaining <= MAX_ROWS) return remaining;
    if (MAX_ROWS == 6) return remaining == 7 || remaining == 10 ? 5 : 6;
    return ceil_div(remaining, ceil_div(remaining, MAX_ROWS));
}

template <class Format>
void all_rows(const Operand& a, int64_t k0, const Panels& panels, float* y, int64_t y_stride) {
    for (int64_t done = 0, rows; done < a.rows; done += rows) {
        rows = tile_rows(a.rows - done);
        sweep<Format>(a.x + done * a.stride + k0, a.stride, rows, panels, y + done * y_stride, y_stride, k0 > 0);
    }
}

template <class Format>
void expand(const uint8_t* weight, int64_t kc, float* out) {
    for (int64_t b = 0; b < kc / Format::BLOCK; b++, weight += Format::BYTES) {
        auto scales = Format::scales(weight);
        for (int i = 0; i < Format::BLOCK; i++, out += P) {
            vf low, high;
            Format::weights(weight, scales, i, low, high);
            store(out, low);
            store(out + W, high);
        }
    }
}

template <class Format>
void many_rows(const Operand& a, const uint8_t* weight, int64_t count, float* y, int64_t y_stride, Scratch* scratch) {
    const int64_t stride = panel_bytes<Format>(a.k);
    const bool expanded = Format::QUANTIZED && a.rows >= EXPAND_TILES * MAX_ROWS;
    const int64_t group = a.rows <= 2 * MAX_ROWS ? MAX_PANELS : 1;  // tiles of few rows take several panels
    for (int64_t k0 = 0; k0 < a.k; k0 += KC) {
        int64_t kc = smaller<int64_t>(KC, a.k - k0);
        for (int64_t p = 0; p < count; p += group) {
            Panels panels{weight + p * stride + panel_bytes<Format>(k0), stride, smaller(group, count - p), kc};
            if (expanded) {
                expand<Format>(panels.weight, kc, scratch->panel);
                panels.weight = (const uint8_t*)scratch->panel;
                all_rows<F32>(a, k0, panels, y + p * P, y_stride);
            } else {
                all_rows<Format>(a, k0, panels, y + p * P, y_stride);
            }
        }
    }
}

// y = a times `count` whole panels from `first` on.
void whole_panels(const Operand& a, const allm_linear& linear, int64_t first, int64_t count, float* y, int64_t y_stride,
                  Scratch* scratch) {
    if (is_integer(linear.format))
        return multiply_integers(*a.quantized, a.first, a.rows, linear, first, count, y, y_stride, &scratch->integer);
    with_float_format(linear.format, [&](auto f) {
        using Format = typename decltype(f)::Panel;
        const int64_t stride = panel_bytes<Format>(a.k);
        Panels panels{(const uint8_t*)linear.weight + first * stride, stride, count, a.k};
        if (a.rows <= MAX_ROWS) sweep<Format>(a.x, a.stride, a.rows, panels, y, y_stride, false);
        else many_rows<Format>(a, panels.weight, count, y, y_stride, scratch);
    });
}

// y[:, first * P … last * P) = a @ weight.T + bias; y points at the first of these columns.
void multiply(const Operand& a, const allm_linear& linear, int64_t first, int64_t last, float* y, int64_t y_stride,
              Scratch* scratch) {
    int64_t whole = smaller(last, linear.n / P) - first;
    if (whole > 0) whole_panels(a, linear, first, whole, y, y_stride, scratch);
    if (last * P > linear.n) {
        whole_panels(a, linear, first + whole, 1, scratch->edge, P, scratch);
        for (int64_t r = 0; r < a.rows; r++)
            memcpy(y + r * y_stride + whole * P, scratch->edge + r * P, sizeof(float) * (linear.n % P));
    }
    if (!linear.bias) return;
    int64_t columns = smaller(last * P, linear.n) - first * P;
    for (int64_t r = 0; r < a.rows; r++)
        for (int64_t j = 0; j < columns; j++) y[r * y_stride + j] += linear.bias[first * P + j];
}

// Tasks of a product: blocks of rows x pieces of the panels.
struct Grid {
    int64_t row_blocks, pieces, panels;

    Grid(allm_pool* pool, int64_t m, int64_t total_panels)
        : row_blocks(larger<int64_t>(1, ceil_div(m, ROW_BLOCK))), panels(total_panels) {
        // A few tasks per thread, so that one who is interrupted does not hold the others up; more where each stays large.
        int64_t threads = num_threads(pool), wanted = threads * (panels >= threads * 32 ? 4 : 2);
        pieces = smaller(panels, larger<int64_t>(1, ceil_div(wanted, row_blocks)));
        if (threads == 1) pieces = 1;
    }
    int64_t tasks() const { return row_blocks * pieces; }
    int64_t row_block(int64_t task) const { return task / pieces; }
    int64_t first_panel(int64_t task) const { return panels * (task % pieces) / pieces; }
    int64_t last_panel(int64_t task) const { return panels * (task % pieces + 1) / pieces; }
};

// What all products of a call share: m rows of x, and the same quantized where some weight wants that.
struct Input {
    const float* x;
    int64_t stride, m, k;
    QuantizedRows quantized;

    int32_t quantize(allm_pool* pool) { return quantize_rows(pool, x, stride, m, k, &quantized); }

    Operand rows_of(const Grid& grid, int64_t task) const {
        int64_t count = grid.row_blocks, block = grid.row_block(task);
        int64_t first = m * block / count, last = m * (block + 1) / count;
        return {x + first * stride, stride, last - first, k, first, &quantized};
    }
};

// ---- argmax ------------------------------------------------------------------------------------------------------

struct Best {
    float value;
    int64_t index;
};

// As torch: the first of equals, and a NaN is greater than everything.
void take_best(Best& best, const float* values, int64_t count, int64_t first_index) {
    for (int64_t j = 0; j < count; j++) {
        bool greater = values[j] > best.value || (values[j] != values[j] && best.value == best.value);
        if (greater || best.index < 0) best = {values[j], first_index + j};
    }
}

bool any_nan(const float* values, int64_t count) {
    vi found = broadcast_int(0);
    int64_t j = 0;
    for (; j + W <= count; j += W) {
        vf v = load(values + j);
        found |= (vi)(v != v);
    }
    bool result = false;
    for (int i = 0; i < W; i++) result |= found[i] != 0;
    for (; j < count; j++) result |= values[j] != values[j];
    return result;
}

float maximum(const float* values, int64_t count) {
    vf top = broadcast(-INFINITY);
    int64_t j = 0;
    for (; j + W <= count; j += W) top = max(top, load(values + j));
    float result = -INFINITY;
    for (int i = 0; i < W; i++) result = larger(result, top[i]);
    for (; j < count; j++) result = larger(result, values[j]);
    return result;
}

// Only a run of columns with a new maximum is looked at one by one, and most have none.
void update_best(Best& best, const float* values, int64_t count, int64_t first_index) {
    if (best.index >= 0 && !any_nan(values, count) && !(maximum(values, count) > best.value)) return;
    take_best(best, values, count, first_index);
}

bool fits(const allm_linear& linear, int64_t m) {
    return linear.weight && m >= 0 && allm_packed_bytes(linear.format, linear.n, linear.k) > 0;
}

}  // namespace

int32_t multiply_group(allm_pool* pool, const float* x, int64_t x_stride, int64_t m, const Product* products, int count) {
    int64_t panels = 0;
    bool integer = false;
    for (int i = 0; i < count; i++) {
        panels += ceil_div(products[i].linear->n, P);
        integer |= is_integer(products[i].linear->format);
    }
    Grid grid(pool, m, panels);
    Input input{x, x_stride, m, products[0].linear->k, {}};
    if (integer)
        if (int32_t status = input.quantize(pool)) return status;
    auto task = [&](int64_t index, uint8_t* scratch) {
        Operand a = input.rows_of(grid, index);
        int64_t begin = 0;
        for (int i = 0; i < count; i++) {
            const Product& product = products[i];
            int64_t end = begin + ceil_div(product.linear->n, P);
            int64_t first = larger(grid.first_panel(index), begin) - begin, last = smaller(grid.last_panel(index), end) - begin;
            float* y = product.y + a.first * product.y_stride + first * P;
            if (first < last) multiply(a, *product.linear, first, last, y, product.y_stride, (Scratch*)scratch);
            begin = end;
        }
    };
    return parallel_for(pool, m ? grid.tasks() : 0, sizeof(Scratch), task);
}

}  // namespace allm

using namespace allm;

int32_t allm_linear_forward(allm_pool* pool, const allm_linear* linear, const float* x, int64_t x_stride, float* y,
                            int64_t y_stride, int64_t m) {
    if (!fits(*linear, m)) return ALLM_BAD_ARGUMENT;
    Product product{linear, y, y_stride};
    return multiply_group(pool, x, x_stride, m, &product, 1);
}

int32_t allm_gated_linear_forward(allm_pool* pool, const allm_linear* gate, const allm_linear* up, int32_t activation,
                                  const float* x, int64_t x_stride, float* y, int64_t y_stride, int64_t m) {
    bool gated = gate && gate->weight;
    if (!fits(*up, m) || (gated && (!fits(*gate, m) || gate->n != up->n || gate->k != up->k))) return ALLM_BAD_ARGUMENT;
    Grid grid(pool, m, ceil_div(up->n, P));
    Input input{x, x_stride, m, up->k, {}};
    if (is_integer(up->format) || (gated && is_integer(gate->format)))
        if (int32_t status = input.quantize(pool)) return status;
    auto task = [&](int64_t index, uint8_t* memory) {
        Scratch* scratch = (Scratch*)memory;
        Operand a = input.rows_of(grid, index);
        for (int64_t p = grid.first_panel(index), end = grid.last_panel(index); p < end; p += PANEL_GROUP) {
            int64_t last = smaller(p + PANEL_GROUP, end), columns = smaller(last * P, up->n) - p * P;
            float* to = y + a.first * y_stride + p * P;
            float* ups = gated ? scratch->second : nullptr;
            multiply(a, gated ? *gate : *up, p, last, to, y_stride, scratch);
            if (gated) multiply(a, *up, p, last, ups, PANEL_GROUP * P, scratch);
            for (int64_t r = 0; r < a.rows; r++)
                activate(activation, to + r * y_stride, gated ? ups + r * PANEL_GROUP * P : nullptr, to + r * y_stride, columns);
        }
    };
    return parallel_for(pool, m ? grid.tasks() : 0, sizeof(Scratch), task);
}

int32_t allm_head_forward(allm_pool* pool, const allm_linear* head, const float* x, int64_t x_stride, float* logits,
                          int64_t logits_stride, int64_t* best, float* best_logits, int64_t m) {
    if (!fits(*head, m)) return ALLM_BAD_ARGUMENT;
    if (!best && !best_logits) return logits ? allm_linear_forward(pool, head, x, x_stride, logits, logits_stride, m) : ALLM_OK;
    Grid grid(pool, m, ceil_div(head->n, P));
    Input input{x, x_stride, m, head->k, {}};
    if (is_integer(head->format))
        if (int32_t status = input.quantize(pool)) return status;
    Best* found = m ? (Best*)malloc(sizeof(Best) * grid.pieces * m) : nullptr;  // [piece][row]
    if (m && !found) return ALLM_NO_MEMORY;
    auto task = [&](int64_t index, uint8_t* memory) {
        Scratch* scratch = (Scratch*)memory;
        Operand a = input.rows_of(grid, index);
        Best* mine = found + index % grid.pieces * m + a.first;
        for (int64_t r = 0; r < a.rows; r++) mine[r] = {-INFINITY, -1};
        for (int64_t p = grid.first_panel(index), end = grid.last_panel(index); p < end; p += PANEL_GROUP) {
            int64_t last = smaller(p + PANEL_GROUP, end), columns = smaller(last * P, head->n) - p * P;
            float* to = logits ? logits + a.first * logits_stride + p * P : scratch->second;
            int64_t stride = logits ? logits_stride : PANEL_GROUP * P;
            multiply(a, *head, p, last, to, stride, scratch);
            for (int64_t r = 0; r < a.rows; r++) update_best(mine[r], to + r * stride, columns, p * P);
        }
    };
    int32_t status = parallel_for(pool, m ? grid.tasks() : 0, sizeof(Scratch), task);
    for (int64_t r = 0; r < m && status == ALLM_OK; r++) {
        Best winner = found[r];
        for (int64_t piece = 1; piece < grid.pieces; piece++) {
            const Best& other = found[piece * m + r];
            take_best(winner, &other.value, 1, other.index);
        }
        if (best) best[r] = winner.index;
        if (best_logits) best_logits[r] = winner.value;
    }
    free(found);
    return status;
}
