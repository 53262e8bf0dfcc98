// Causal attention of a flat batch over paged KV: whole prompts, chunks of prompts and decode steps are one case.
//
// The order of every sum is a function of the query's own position, so that a token's output is the same bit for bit
// whether its prompt came whole or in chunks, alone or in a batch, on one thread or many:
//
//   positions   0 ......... 255 | 256 ....... 511 | 512 ... p         chunks of 256 by absolute position
//   each chunk  scores (one accumulator per token, over the head dim in order), their maximum, exp, a sum over 16 virtual
//               lanes, and the weighted values (one accumulator per element, token after token, from zero)
//   the row     merges its chunks one after the other, from the first
//
// Tokens outside of a row's range get weight 0, which changes no bit; so rows of different ranges can share a tile, and a
// chunk may begin at any group of 16 tokens.
//
// Work is cut into tiles (row of the batch, KV head, up to TILE_ROWS rows = tokens x heads of the group) and, where that
// leaves threads idle, into chunks whose partial results are merged afterwards: the same merge in the same order.
#include <stdlib.h>

#include "kv.h"
#include "threads.h"

namespace allm {
namespace {

constexpr int CHUNK = 256;
constexpr int GROUPS = CHUNK / GROUP;
constexpr int TILE_ROWS = 64;
constexpr int AHEAD = 4;  // groups to prefetch ahead: keys and values come from memory in long decodes
constexpr int ROWS = NUM_REGISTERS == 32 ? 6 : W == 8 ? 6 : 3;  // rows of a micro-kernel
constexpr int SCORE_SUMS = NUM_REGISTERS == 32 ? 24 : 12;       // accumulators of the score micro-kernel

struct Problem {
    KvLayout layout;
    const allm_batch* batch;
    const float* query;
    int64_t query_stride;
    int64_t group;  // query heads per KV head
    float scale;
    int64_t window;
    float* out;
    int64_t out_stride;
    const void* blocks;
};

// A tile of rows: tokens [first, first + count) of batch row `seq`, all heads of one KV head.
struct Tile {
    int32_t seq, kv_head;
    int64_t first, count;  // tokens of the flat batch
    int64_t position;      // of the first token
    int32_t first_chunk, last_chunk;
    int64_t partial;  // index of its first partial result, -1: this tile is done in one task
};

struct Task {
    int64_t tile;
    int32_t first_chunk, last_chunk;
};

// One row's state: the greatest score, the sum of the weights, and sum_t weight_t * value_t in `values`.
struct RowState {
    float top, total;
};
constexpr float EMPTY = -INFINITY;

struct Range {
    int64_t begin, end;
};

// Which tokens the query at this position sees.
ALLM_INLINE Range visible(const Problem& problem, int64_t position) {
    int64_t end = position + 1;
    return {problem.window > 0 ? larger<int64_t>(0, end - problem.window) : 0, end};
}
ALLM_INLINE Range intersect(Range a, Range b) { return {larger(a.begin, b.begin), smaller(a.end, b.end)}; }

// ---- micro-kernels -----------------------------------------------------------------------------------------------

// scores[r][n * 16 + lane] = query[r] . key of that token, for N groups of 16 tokens whose keys are at keys[n]; what is
// used AHEAD groups later is prefetched
template <class Kv, int R, int N>
ALLM_NOINLINE void score(const float* query, int64_t query_stride, const typename Kv::Element* const* keys, float* scores,
                         int64_t dim) {
    vf sum[R][N * PARTS];
    unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { unroll<N * PARTS>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][j] = zero(); }); });
    const typename Kv::Element* key[N];
    const typename Kv::Element* ahead[N];
    unroll<N>([&](auto n) ALLM_LAMBDA_INLINE { key[n] = keys[n], ahead[n] = keys[n + AHEAD]; });
    for (int64_t i = 0; i < dim; i++) {
        unroll<N>([&](auto n) ALLM_LAMBDA_INLINE {
            __builtin_prefetch(ahead[n] + i * GROUP);
            vf k[PARTS];
            unroll<PARTS>([&](auto j) ALLM_LAMBDA_INLINE { k[j] = Kv::load(key[n] + i * GROUP + j * W); });
            unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                vf q = broadcast(query[r * query_stride + i]);
                unroll<PARTS>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][n * PARTS + j] = fma(q, k[j], sum[r][n * PARTS + j]); });
            });
            forget_memory();
        });
    }
    unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
        unroll<N * PARTS>([&](auto j) ALLM_LAMBDA_INLINE { store(scores + r * CHUNK + j * W, sum[r][j]); });
    });
}

// values[r][0 … N * W) = sum over `count` tokens of weights[r][t] * value[t]; group g of 16 tokens is at groups[g] + column
template <class Kv, int R, int N>
ALLM_NOINLINE void weigh(const float* weights, const typename Kv::Element* const* groups, int64_t column,
                         int64_t value_stride, int64_t count, float* values) {
    vf sum[R][N];
    auto for_each_sum = [&](auto&& body) ALLM_LAMBDA_INLINE {
        unroll<R>([&](auto r) ALLM_LAMBDA_INLINE { unroll<N>([&](auto j) ALLM_LAMBDA_INLINE { body(r, j); }); });
    };
    for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { sum[r][j] = zero(); });
    for (; count > 0; count -= GROUP, groups++, weights += GROUP) {
        const typename Kv::Element* value = groups[0] + column;
        const typename Kv::Element* ahead = groups[AHEAD] + column;
        const int64_t tokens = smaller<int64_t>(GROUP, count);
#pragma GCC unroll 1
        for (int64_t t = 0; t < tokens; t++) {
            vf v[N];
            unroll<N>([&](auto j) ALLM_LAMBDA_INLINE {
                v[j] = Kv::load(value + t * value_stride + j * W);
                __builtin_prefetch(ahead + t * value_stride + j * W);
            });
            unroll<R>([&](auto r) ALLM_LAMBDA_INLINE {
                vf p = broadcast(weights[r * CHUNK + t]);
                unroll<N>([&](auto j) ALLM_LAMBDA_INLINE { sum[r][j] = fma(p, v[j], sum[r][j]); });
            });
        }
    }
    for_each_sum([&](auto r, auto j) ALLM_LAMBDA_INLINE { store(values + r * value_stride + column + j * W, sum[r][j]); });
}

// scores[0 … CHUNK) -> weights exp(score - top); returns top and their sum. Only [inside.begin, inside.end) counts; groups
// outside of [begin, end) are not touched.
RowState soften(float* scores, Range groups, Range inside) {
    Lanes top = lanes(EMPTY), total = lanes(0.0f);
    for (int64_t i = groups.begin; i < groups.end; i += GROUP) {
        bool partial = i < inside.begin || i + GROUP > inside.end;
        for (int part = 0; part < PARTS; part++) {
            float* at = scores + i + part * W;
            vf s = load(at);
            if (partial) {
                vi token = lane_index() + (int32_t)(i + part * W);
                s = where((token >= (int32_t)inside.begin) & (token < (int32_t)inside.end), s, broadcast(EMPTY));
                store(at, s);
            }
            top.part[part] = max(top.part[part], s);
        }
    }
    vf greatest = broadcast(max(top));
    for (int64_t i = groups.begin; i < groups.end; i += GROUP) {
        for (int part = 0; part < PARTS; part++) {
            float* at = scores + i + part * W;
            vf s = load(at), weight = exp(s - greatest);
            weight = where(s == broadcast(EMPTY), zero(), weight);
            store(at, weight);
            total.part[part] += weight;
        }
    }
    return {greatest[0], sum(total)};
}

// ---- one chunk of some rows --------------------------------------------------------------------------------------

// Up to ROWS rows of a tile: their queries, what each sees, and where a chunk's results go.
struct Rows {
    int count;
    const float* query;  // [count][dim], scaled
    const Range* visible;
};

struct ChunkScratch {
    float scores[ROWS * CHUNK];
};

template <class Kv, int R>
void score_groups(const Rows& rows, const typename Kv::Element* const* keys, int64_t count, float* scores, int64_t dim) {
    constexpr int N = SCORE_SUMS / (R * PARTS) > 4 ? 4 : larger(1, SCORE_SUMS / (R * PARTS));
    int64_t g = 0;
    for (; g + N <= count; g += N) score<Kv, R, N>(rows.query, dim, keys + g, scores + g * GROUP, dim);
    for (; g < count; g++) score<Kv, R, 1>(rows.query, dim, keys + g, scores + g * GROUP, dim);
}

template <class Kv, int R>
void weigh_groups(const float* weights, const typename Kv::Element* const* groups, int64_t value_stride, int64_t count,
                  float* values) {
    constexpr int N = R * 4 + 5 <= NUM_REGISTERS ? 4 : R * 2 + 3 <= NUM_REGISTERS ? 2 : 1;  // sums, values, one weight
    int64_t j = 0;
    for (; j + N * W <= value_stride; j += N * W) weigh<Kv, R, N>(weights, groups, j, value_stride, count, values);
    for (; j < value_stride; j += W) weigh<Kv, R, 1>(weights, groups, j, value_stride, count, values);
}

// Where a chunk's groups lie, in the order of their use: `count` groups of keys, as many of values, and what comes after
// them: the keys of the next chunk, or the last values once more.
template <class Kv>
struct Uses {
    const typename Kv::Element* groups[2 * GROUPS + AHEAD];

    Uses(const Problem& problem, const Tile& tile, int64_t origin, int64_t first, int64_t count) {
        const KvLayout& layout = problem.layout;
        const int32_t* table = problem.batch->block_table + tile.seq * problem.batch->block_table_stride;
        const auto* blocks = (const typename Kv::Element*)problem.blocks;
        const int64_t next = origin + CHUNK, end = tile.last_chunk * (int64_t)CHUNK, length = problem.batch->seq_lens[tile.seq];
        for (int64_t g = 0; g < count; g++) {
            int64_t token = origin + (first + g) * GROUP, offset = token % layout.block_size;
            const auto* head = blocks + layout.head(table[token / layout.block_size], tile.kv_head);
            groups[g] = head + layout.key(offset);
            groups[count + g] = head + layout.value(offset);
        }
        for (int64_t g = 0; g < AHEAD; g++) {
            int64_t token = next + g * GROUP;
            bool there = token < smaller(end, length);
            groups[2 * count + g] = !there ? groups[2 * count - 1]
                                           : blocks + layout.head(table[token / layout.block_size], tile.kv_head) +
                                                 layout.key(token % layout.block_size);
        }
    }
};

// The partial results of R rows over one chunk: states[r], values[r][value_stride].
template <class Kv, int R>
void attend_chunk(const Problem& problem, const Tile& tile, const Rows& rows, int64_t chunk, ChunkScratch* scratch,
                  RowState* states, float* values) {
    const KvLayout& layout = problem.layout;
    const int64_t origin = chunk * CHUNK, dim = layout.head_dim;
    Range all{CHUNK, 0};  // relative to the chunk
    for (int r = 0; r < R; r++) {
        Range row = intersect({rows.visible[r].begin - origin, rows.visible[r].end - origin}, {0, CHUNK});
        if (row.begin < row.end) all = {smaller(all.begin, row.begin), larger(all.end, row.end)};
    }
    for (int r = 0; r < R; r++) states[r] = {EMPTY, 0.0f};
    if (all.begin >= all.end) return;

    const int64_t first = all.begin / GROUP, count = ceil_div(all.end, GROUP) - first;
    Uses<Kv> uses(problem, tile, origin, first, count);
    score_groups<Kv, R>(rows, uses.groups, count, scratch->scores + first * GROUP, dim);
    for (int r = 0; r < R; r++) {
        Range inside{rows.visible[r].begin - origin, rows.visible[r].end - origin};
        float* scores = scratch->scores + r * CHUNK;
        if (inside.begin < CHUNK && inside.end > 0) states[r] = soften(scores, {first * GROUP, (first + count) * GROUP}, inside);
        else memset(scores + first * GROUP, 0, sizeof(float) * count * GROUP);
    }
    // Not a token past the last: nothing has been written there.
    weigh_groups<Kv, R>(scratch->scores + first * GROUP, uses.groups + count, layout.value_stride, all.end - first * GROUP,
                        values);
}

template <class Kv>
void attend_rows(const Problem& problem, const Tile& tile, const Rows& rows, int64_t chunk, ChunkScratch* scratch,
                 RowState* states, float* values) {
    auto with = [&](auto r) { attend_chunk<Kv, decltype(r)::value>(problem, tile, rows, chunk, scratch, states, values); };
    switch (rows.count) {
        case 1: return with(std::integral_constant<int, 1>{});
        case 2: return with(std::integral_constant<int, 2>{});
        case 3: return with(std::integral_constant<int, 3>{});
#if defined(ALLM_AVX512) || defined(ALLM_AVX2) || defined(__aarch64__)
        case 4: return with(std::integral_constant<int, 4>{});
        case 5: return with(std::integral_constant<int, 5>{});
        case 6: return with(std::integral_constant<int, 6>{});
#endif
    }
}

// The one way in which chunks come together: `state` and `values` hold the chunks before, `next` is the chunk after them.
void merge(RowState& state, float* values, RowState next, const float* next_values, int64_t n) {
    if (next.top == EMPTY && next.total == 0.0f) return;
    if (state.top == EMPTY && state.total == 0.0f) {
        state = next;
        memcpy(values, next_values, sizeof(float) * n);
        return;
    }
    float top = larger(state.top, next.top), old = exp(state.top - top), fresh = exp(next.top - top);
    state = {top, fma(next.total, fresh, state.total * old)};
    for (int64_t i = 0; i < n; i += W)
        store(values + i, fma(load(next_values + i), broadcast(fresh), load(values + i) * broadcast(old)));
}

void finish(const Problem& problem, int64_t token, int64_t head, const RowState& state, const float* values) {
    float* out = problem.out + token * problem.out_stride + head * problem.layout.head_dim;
    for (int64_t i = 0; i < problem.layout.head_dim; i++) out[i] = values[i] / state.total;
}

// ---- tasks -------------------------------------------------------------------------------------------------------

// Results of one tile, or of one chunk of it: [rows] states, then [rows][value_stride] values.
struct Results {
    RowState* states;
    float* values;
};

int64_t results_floats(const Problem& problem, int64_t rows) { return round_up(rows * (2 + problem.layout.value_stride), 16); }
Results results_at(float* memory, int64_t rows) { return {(RowState*)memory, memory + 2 * rows}; }

int64_t rows_of(const Problem& problem, const Tile& tile) { return tile.count * problem.group; }

// Scratch of a thread, in floats: scaled queries, the tile's results, one chunk's results of ROWS rows.
struct TaskScratch {
    ChunkScratch* chunk;
    Range* visible;
    float *query, *results, *chunk_results;

    static int64_t max_rows(const Problem& problem) { return larger<int64_t>(TILE_ROWS, problem.group); }
    static size_t bytes(const Problem& problem) {
        int64_t rows = max_rows(problem);
        return sizeof(ChunkScratch) + sizeof(Range) * rows +
               sizeof(float) * (rows * problem.layout.head_dim + results_floats(problem, rows) + results_floats(problem, ROWS));
    }
    TaskScratch(uint8_t* memory, const Problem& problem) {
        int64_t rows = max_rows(problem);
        chunk = (ChunkScratch*)memory;
        visible = (Range*)(memory + sizeof(ChunkScratch));
        results = (float*)(visible + rows);
        chunk_results = results + results_floats(problem, rows);
        query = chunk_results + results_floats(problem, ROWS);
    }
};

// Row r of a tile is token r / group, head r % group of the KV head's query heads.
void gather_queries(const Problem& problem, const Tile& tile, TaskScratch& scratch) {
    const int64_t dim = problem.layout.head_dim;
    for (int64_t t = 0; t < tile.count; t++) {
        const float* from = problem.query + (tile.first + t) * problem.query_stride + tile.kv_head * problem.group * dim;
        float* to = scratch.query + t * problem.group * dim;
        for (int64_t i = 0; i < problem.group * dim; i++) to[i] = from[i] * problem.scale;
        for (int64_t h = 0; h < problem.group; h++)
            scratch.visible[t * problem.group + h] = visible(problem, tile.position + t);
    }
}

template <class Kv>
void attend(const Problem& problem, const Tile& tile, const Task& task, float* partials, uint8_t* memory) {
    TaskScratch scratch(memory, problem);
    gather_queries(problem, tile, scratch);
    const int64_t count = rows_of(problem, tile), dim = problem.layout.head_dim, width = problem.layout.value_stride;
    Results whole = results_at(scratch.results, count), part = results_at(scratch.chunk_results, ROWS);
    for (int64_t r = 0; r < count; r++) whole.states[r] = {EMPTY, 0.0f};
    for (int64_t chunk = task.first_chunk; chunk < task.last_chunk; chunk++) {
        if (partials) {
            int64_t index = tile.partial + chunk - tile.first_chunk;
            whole = results_at(partials + index * results_floats(problem, TaskScratch::max_rows(problem)), count);
        }
        for (int64_t r = 0; r < count; r += ROWS) {
            Rows rows{(int)smaller<int64_t>(ROWS, count - r), scratch.query + r * dim, scratch.visible + r};
            if (partials) {
                attend_rows<Kv>(problem, tile, rows, chunk, scratch.chunk, whole.states + r, whole.values + r * width);
                continue;
            }
            attend_rows<Kv>(problem, tile, rows, chunk, scratch.chunk, part.states, part.values);
            for (int i = 0; i < rows.count; i++)
                merge(whole.states[r + i], whole.values + (r + i) * width, part.states[i], part.values + i * width, width);
        }
    }
    if (partials) return;
    for (int64_t r = 0; r < count; r++)
        finish(problem, tile.first + r / problem.group, tile.kv_head * problem.group + r % problem.group, whole.states[r],
               whole.values + r * width);
}

void merge_partials(const Problem& problem, const Tile& tile, float* partials) {
    const int64_t count = rows_of(problem, tile), width = problem.layout.value_stride;
    const int64_t stride = results_floats(problem, TaskScratch::max_rows(problem));
    Results whole = results_at(partials + tile.partial * stride, count);
    for (int64_t c = 1; c < tile.last_chunk - tile.first_chunk; c++) {
        Results next = results_at(partials + (tile.partial + c) * stride, count);
        for (int64_t r = 0; r < count; r++)
            merge(whole.states[r], whole.values + r * width, next.states[r], next.values + r * width, width);
    }
    for (int64_t r = 0; r < count; r++)
        finish(problem, tile.first + r / problem.group, tile.kv_head * problem.group + r % problem.group, whole.states[r],
               whole.values + r * width);
}

// ---- planning ----------------------------------------------------------------------------------------------------

// Grows by malloc: the library needs no C++ runtime.
template <class T>
struct List {
    T* items = nullptr;
    int64_t size = 0, capacity = 0;
    bool failed = false;

    ~List() { free(items); }
    void add(const T& item) {
        if (size == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            T* grown = (T*)realloc((void*)items, sizeof(T) * capacity);
            failed |= !grown;
            if (!grown) return;
            items = grown;
        }
        items[size++] = item;
    }
};

void cut_into_tiles(const Problem& problem, List<Tile>& tiles) {
    const allm_batch& batch = *problem.batch;
    const int64_t per_tile = larger<int64_t>(1, TILE_ROWS / problem.group);
    for (int32_t seq = 0; seq < batch.num_seqs && !tiles.failed; seq++) {
        int64_t begin = batch.query_start[seq], end = batch.query_start[seq + 1];
        int64_t offset = batch.seq_lens[seq] - end;  // position = token + offset
        for (int64_t last = end; last > begin && !tiles.failed; last -= per_tile) {  // the longest first
            int64_t first = larger(begin, last - per_tile);
            Tile tile{seq, 0, first, last - first, first + offset, 0, 0, -1};
            tile.first_chunk = (int32_t)(visible(problem, first + offset).begin / CHUNK);
            tile.last_chunk = (int32_t)ceil_div(last + offset, CHUNK);
            for (tile.kv_head = 0; tile.kv_head < problem.layout.num_kv_heads && !tiles.failed; tile.kv_head++) tiles.add(tile);
        }
    }
}

// A tile that is much of all the work becomes several tasks. Returns the number of partial results.
int64_t cut_into_tasks(List<Tile>& tiles, int64_t threads, List<Task>& tasks) {
    int64_t total = 0, partials = 0;
    for (int64_t i = 0; i < tiles.size; i++) total += tiles.items[i].last_chunk - tiles.items[i].first_chunk;
    int32_t most = threads == 1 ? INT32_MAX : (int32_t)larger<int64_t>(1, total / (4 * threads));
    for (int64_t i = 0; i < tiles.size && !tasks.failed; i++) {
        Tile& tile = tiles.items[i];
        if (tile.last_chunk - tile.first_chunk <= most) {
            tasks.add({i, tile.first_chunk, tile.last_chunk});
            continue;
        }
        tile.partial = partials;
        partials += tile.last_chunk - tile.first_chunk;
        for (int32_t c = tile.first_chunk; c < tile.last_chunk && !tasks.failed; c += most)
            tasks.add({i, c, smaller(c + most, tile.last_chunk)});
    }
    return partials;
}

template <class Kv>
int32_t run(allm_pool* pool, const Problem& problem) {
    List<Tile> tiles;
    List<Task> tasks;
    cut_into_tiles(problem, tiles);
    int64_t num_partials = cut_into_tasks(tiles, num_threads(pool), tasks);
    if (tiles.failed || tasks.failed) return ALLM_NO_MEMORY;
    float* partials = nullptr;
    if (num_partials) {
        partials = (float*)malloc(sizeof(float) * num_partials * results_floats(problem, TaskScratch::max_rows(problem)));
        if (!partials) return ALLM_NO_MEMORY;
    }
    auto task = [&](int64_t index, uint8_t* scratch) {
        const Tile& tile = tiles.items[tasks.items[index].tile];
        attend<Kv>(problem, tile, tasks.items[index], tile.partial < 0 ? nullptr : partials, scratch);
    };
    int32_t status = parallel_for(pool, tasks.size, TaskScratch::bytes(problem), task);
    auto merge_tile = [&](int64_t index, uint8_t*) {
        if (tiles.items[index].partial >= 0) merge_partials(problem, tiles.items[index], partials);
    };
    if (status == ALLM_OK && num_partials) status = parallel_for(pool, tiles.size, 0, merge_tile);
    free(partials);
    return status;
}

}  // namespace
}  // namespace allm

using namespace allm;

int32_t allm_paged_attention(allm_pool* pool, const allm_kv_cache* cache, const allm_batch* batch, const float* query,
                             int64_t query_stride, int32_t num_heads, float scale, int32_t window, float* out,
                             int64_t out_stride) {
    if (!is_valid(*cache) || num_heads < 1 || num_heads % cache->num_kv_heads) return ALLM_BAD_ARGUMENT;
    Problem problem{KvLayout(*cache), batch, query, query_stride, num_heads / cache->num_kv_heads, scale, window, out,
                    out_stride, cache->blocks};
    int32_t status = ALLM_BAD_ARGUMENT;
    with_kv_format(cache->format, [&](auto format) { status = run<decltype(format)>(pool, problem); });
    return status;
}
