// Packing weights into panels at load time, and reading single rows back (embedding lookup from a tied head).
#include "formats.h"
#include "quantize_weights.h"
#include "threads.h"

namespace allm {
namespace {

constexpr int64_t ROWS_PER_CHUNK = 4 * P;

float source_value(int32_t format, const void* source, int64_t index) {
    switch (format) {
        case ALLM_BF16: return from_bf16(((const uint16_t*)source)[index]);
        case ALLM_F16: return from_f16(((const uint16_t*)source)[index]);
        default: return ((const float*)source)[index];
    }
}

using Quantize = void (*)(WeightBlocks& blocks);

// What makes this format of plain numbers; null: nothing does.
Quantize quantizer(int32_t format) {
    switch (is_integer(format) ? format - ALLM_INTEGER : format) {
        case ALLM_Q8_0: return quantize_8_bits;
        case ALLM_Q4_1: return quantize_4_bits;
        default: return nullptr;
    }
}

constexpr bool is_plain(int32_t format) { return format >= ALLM_F32 && format <= ALLM_F16; }

bool can_pack(int32_t format, int32_t source_format) {
    if (is_plain(source_format)) return is_plain(format) || quantizer(format);
    return source_format == (is_integer(format) ? format - ALLM_INTEGER : format);
}

template <class Format>
void pack_blocks(uint8_t* panel, int column, int64_t k, const uint8_t* source) {
    constexpr int PARTS_OF_SOURCE = Format::SOURCE_BLOCK / Format::BLOCK;
    for (int64_t b = 0; b < k / Format::BLOCK; b++)
        Format::put_block(panel + b * Format::BYTES, column, source + b / PARTS_OF_SOURCE * Format::SOURCE_BYTES,
                          (int)(b % PARTS_OF_SOURCE));
}

struct Source {  // rows of plain numbers
    int32_t format;
    const void* numbers;
    int64_t k;
};

// 32 numbers of up to W rows from `row` and `first` on, one row per lane; what lies beyond the rows and K is zero.
void load_blocks(const Source& source, int64_t row, int64_t rows, int64_t first, WeightBlocks& blocks) {
    float values[WEIGHT_BLOCK][W] = {};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < smaller<int64_t>(WEIGHT_BLOCK, source.k - first); i++)
            values[i][r] = source_value(source.format, source.numbers, (row + r) * source.k + first + i);
    for (int i = 0; i < WEIGHT_BLOCK; i++) blocks.x[i] = load(values[i]);
}

// Up to W rows of plain numbers as columns of a panel, quantized.
template <class Format>
void pack_quantized(uint8_t* panel, int column, const Source& source, int64_t row, int64_t rows) {
    for (int64_t first = 0; first < source.k; first += WEIGHT_BLOCK, panel += Format::BYTES) {
        WeightBlocks blocks;
        load_blocks(source, row, rows, first, blocks);
        quantizer(Format::ID)(blocks);
        for (int64_t r = 0; r < rows; r++) Format::put_line(panel, column + (int)r, blocks.scale[r], blocks.minimum[r]);
        for (int i = 0; i < WEIGHT_BLOCK; i++) {
            vi numbers = __builtin_convertvector(blocks.numbers[i], vi);
            for (int64_t r = 0; r < rows; r++) Format::put_number(panel, i, column + (int)r, numbers[r]);
        }
    }
}

// Rows [from, to) of the weight, which are those from `row` on of the source. Returns how many it packed.
template <class Format>
int64_t pack_some(uint8_t* packed, int64_t from, int64_t to, int32_t source_format, const void* source, int64_t k, int64_t row) {
    uint8_t* panel = packed + from / P * panel_bytes<Format>(k);
    const int column = (int)(from % P);
    if constexpr (!Format::QUANTIZED) {
        for (int64_t i = 0; i < k; i++)
            Format::put(panel + i * Format::BYTES, 0, column, source_value(source_format, source, row * k + i));
        return 1;
    } else {
        if constexpr (Format::ID % ALLM_INTEGER == ALLM_Q8_0 || Format::ID % ALLM_INTEGER == ALLM_Q4_1) {
            if (is_plain(source_format)) {
                int64_t rows = smaller<int64_t>(smaller<int64_t>(W, to - from), P - column);
                pack_quantized<Format>(panel, column, {source_format, source, k}, row, rows);
                return rows;
            }
        }
        const int64_t row_bytes = k / Format::SOURCE_BLOCK * Format::SOURCE_BYTES;
        pack_blocks<Format>(panel, column, k, (const uint8_t*)source + row * row_bytes);
        return 1;
    }
}

template <class Format>
void unpack_row(const uint8_t* panel, int column, int64_t k, float scale, float* out) {
    for (int64_t i = 0; i < k; i++) {
        const uint8_t* block = panel + i / Format::BLOCK * Format::BYTES;
        out[i] = scale * Format::get(block, (int)(i % Format::BLOCK), column);
    }
}

}  // namespace
}  // namespace allm

using namespace allm;

int64_t allm_packed_bytes(int32_t format, int64_t n, int64_t k) {
    int64_t bytes = ALLM_BAD_ARGUMENT;
    if (n < 1 || k < 1) return bytes;
    with_format(format, [&](auto f) {
        using Format = decltype(f);
        bool filled_up = is_integer(format) && quantizer(format);
        if (filled_up || k % source_block<Format>() == 0) bytes = ceil_div(n, P) * panel_bytes<Format>(k);
    });
    return bytes;
}

int32_t allm_pack_rows(allm_pool* pool, int32_t format, void* packed, int64_t n, int64_t k, int64_t first_row, int64_t rows,
                       int32_t source_format, const void* source) {
    if (allm_packed_bytes(format, n, k) < 0 || first_row < 0 || rows < 0 || first_row + rows > n) return ALLM_BAD_ARGUMENT;
    if (!can_pack(format, source_format) || (!is_plain(source_format) && k % WEIGHT_BLOCK)) return ALLM_BAD_ARGUMENT;
    int32_t status = ALLM_BAD_ARGUMENT;
    with_format(format, [&](auto f) {
        using Format = decltype(f);
        // Chunks begin at panel borders: two threads never write into one panel (nibbles of two columns share a byte).
        int64_t begin = first_row / P * P;
        auto chunk = [&](int64_t index, uint8_t*) {
            int64_t from = larger(begin + index * ROWS_PER_CHUNK, first_row);
            int64_t to = smaller(begin + (index + 1) * ROWS_PER_CHUNK, first_row + rows);
            while (from < to)
                from += pack_some<Format>((uint8_t*)packed, from, to, source_format, source, k, from - first_row);
        };
        status = parallel_for(pool, ceil_div(first_row + rows - begin, ROWS_PER_CHUNK), 0, chunk);
    });
    return status;
}

int32_t allm_gather_rows(allm_pool* pool, const allm_linear* weight, const int64_t* ids, int64_t num_ids, float scale,
                         float* out, int64_t out_stride) {
    for (int64_t i = 0; i < num_ids; i++)
        if (ids[i] < 0 || ids[i] >= weight->n) return ALLM_BAD_ARGUMENT;
    int32_t status = ALLM_BAD_ARGUMENT;
    with_format(weight->format, [&](auto f) {
        using Format = decltype(f);
        auto rows = [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                const uint8_t* panel = (const uint8_t*)weight->weight + ids[i] / P * panel_bytes<Format>(weight->k);
                unpack_row<Format>(panel, (int)(ids[i] % P), weight->k, scale, out + i * out_stride);
            }
        };
        status = parallel_rows(pool, num_ids, 8, rows);
    });
    return status;
}
