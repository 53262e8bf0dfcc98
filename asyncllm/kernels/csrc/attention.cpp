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
// chunk may begin at any group of 16 tokens. Where blocks are no multiples of 16 tokens, the holes at their ends count as
// positions that nobody sees.
//
// Work is cut into tiles (row of the batch, KV head, up to TILE_ROWS rows = tokens x heads of the group) and, where that
// leaves threads idle, into chunks whose partial results are merged afterwards: the same merge in the same order. A tile
// passes a chunk piece by piece (attention_kernels.h), all its blocks of rows over one piece.
#include <stdlib.h>

#include "attention_kernels.h"
#include "threads.h"

namespace allm {
namespace {

constexpr int TILE_ROWS = 96;
constexpr int64_t PIECE_BYTES = 16384;  // of a piece that several blocks of rows read: half of a small first cache

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
    const uint8_t* blocks;
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

// Which places (positions, with the holes before them) the query at this position sees.
ALLM_INLINE Range visible(const Problem& problem, int64_t position) {
    int64_t first = problem.window > 0 ? larger<int64_t>(0, position + 1 - problem.window) : 0;
    return {problem.layout.place(first), problem.layout.place(position) + 1};
}

// ---- one chunk of a tile -----------------------------------------------------------------------------------------

// Some rows of a tile, for one micro-kernel.
struct RowBlock {
    int64_t first;
    int count;
    Range tokens;  // of the current chunk: what at least one row sees; begin >= end: nothing
};

ALLM_INLINE Range groups_of(Range tokens) { return {tokens.begin / GROUP, ceil_div(tokens.end, GROUP)}; }

// Row r of a tile is token r / group, head r % group of the KV head's query heads.
struct Rows {
    int64_t count, num_blocks;
    RowBlock* blocks;
    Range* visible;  // [count]
    float* query;    // [count][dim], scaled
};

// Results of one tile, or of one chunk of it: [rows] states, then [rows][value_stride] values.
struct Results {
    RowState* states;
    float* values;
};

int64_t results_floats(const Problem& problem, int64_t rows) { return round_up(rows * (2 + problem.layout.value_stride), 16); }
Results results_at(float* memory, int64_t rows) { return {(RowState*)memory, memory + 2 * rows}; }

int64_t rows_of(const Problem& problem, const Tile& tile) { return tile.count * problem.group; }

// Scratch of a thread.
struct Scratch {
    Rows rows;
    float *scores, *results, *chunk_results;
    size_t bytes;

    static int64_t max_rows(const Problem& problem) { return larger<int64_t>(TILE_ROWS, problem.group); }
    Scratch(uint8_t* memory, const Problem& problem) : bytes(0) {
        const int64_t most = max_rows(problem);
        auto take = [&](auto*& place, int64_t count) {
            place = (decltype(+place))((uintptr_t)memory + bytes);
            bytes += round_up(count * (int64_t)sizeof(*place), CACHE_LINE_BYTES);
        };
        take(scores, most * CHUNK);
        take(results, results_floats(problem, most));
        take(chunk_results, results_floats(problem, most));
        take(rows.query, most * problem.layout.head_dim);
        take(rows.visible, most);
        take(rows.blocks, most);
    }
};

// Groups of a piece: several blocks of rows, or several passes over its columns, find it in the first cache again.
int64_t piece_groups(const Problem& problem, const Rows& rows) {
    if (rows.num_blocks == 1) return problem.layout.value_stride <= 4 * W ? GROUPS : PIECE;
    return smaller<int64_t>(PIECE, larger<int64_t>(SCORE_SUMS / (ROWS * PARTS) / 2, PIECE_BYTES / problem.layout.value_bytes));
}

Uses uses_of(const Problem& problem, const Tile& tile, int64_t chunk, Range tokens) {
    const KvLayout& layout = problem.layout;
    const int32_t* table = problem.batch->block_table + tile.seq * problem.batch->block_table_stride;
    const int64_t end = layout.place(problem.batch->seq_lens[tile.seq] - 1) + 1, per_block = layout.padded_block;
    Uses uses;
    uses.first = tokens.begin / GROUP, uses.count = ceil_div(tokens.end, GROUP) - uses.first;
    for (int64_t g = 0; g < uses.count; g++) {
        int64_t place = chunk * CHUNK + (uses.first + g) * GROUP, in_block = place % per_block;
        int32_t block = table[place / per_block];
        uses.at[g] = problem.blocks + layout.keys(block, tile.kv_head, in_block / GROUP);
        uses.at[uses.count + g] = problem.blocks + layout.values(block, tile.kv_head, in_block / GROUP);
        uses.filled[g] = (int32_t)smaller<int64_t>(GROUP, layout.block_size - in_block);
    }
    for (int64_t g = 0; g < GROUPS; g++) {  // the keys of the next chunk, or something that is there
        int64_t place = (chunk + 1) * CHUNK + g * GROUP;
        bool there = place < smaller(end, tile.last_chunk * (int64_t)CHUNK);
        uses.at[2 * uses.count + g] = !there ? uses.at[2 * uses.count - 1]
                                             : problem.blocks + layout.keys(table[place / per_block], tile.kv_head,
                                                                            place % per_block / GROUP);
    }
    return uses;
}

// Which tokens of a chunk the blocks of rows see; returns the same for all of them together.
Range see_chunk(const Rows& rows, int64_t chunk) {
    const int64_t origin = chunk * CHUNK;
    Range all{CHUNK, 0};
    for (int64_t b = 0; b < rows.num_blocks; b++) {
        RowBlock& block = rows.blocks[b];  // positions grow from row to row
        Range seen{rows.visible[block.first].begin - origin, rows.visible[block.first + block.count - 1].end - origin};
        block.tokens = intersect(seen, {0, CHUNK});
        if (block.tokens.begin < block.tokens.end)
            all = {smaller(all.begin, block.tokens.begin), larger(all.end, block.tokens.end)};
    }
    return all;
}

// A pass over a chunk's keys or values, piece by piece: body(block of rows, its groups of the chunk, their addresses, what to
// prefetch).
template <class Body>
void for_each_piece(const Problem& problem, const Rows& rows, const Uses& uses, const uint8_t* const* groups, int64_t distance,
                    Body&& body) {
    const int64_t size = piece_groups(problem, rows);
    for (int64_t from = 0; from < uses.count; from += size) {
        const Range piece{uses.first + from, uses.first + smaller(from + size, uses.count)};
        for (int64_t b = 0; b < rows.num_blocks; b++) {
            const RowBlock& block = rows.blocks[b];
            const Range mine = intersect(groups_of(block.tokens), piece);
            if (mine.begin >= mine.end) continue;
            const uint8_t* const* at = groups + (mine.begin - uses.first);
            body(block, mine, at, b ? at : at + distance);  // the first block of rows fetches for all
        }
    }
}

// Scores of a block of rows -> their weights and states.
template <class Kv>
void soften_block(const Rows& rows, const RowBlock& block, int64_t origin, const Uses& uses, float* scores, RowState* states) {
    const Range groups = groups_of(block.tokens);
    auto sight = [&](int64_t r) {
        return Sight{groups, {rows.visible[r].begin - origin, rows.visible[r].end - origin}, uses};
    };
    const int64_t end = block.first + block.count;
    for (int64_t r = block.first; r < end; r++) states[r].top = finish_scores<Kv>(scores + r * CHUNK, sight(r));
    for (int64_t r = block.first; r < end; r++)
        states[r].total = soften<Kv>(scores + r * CHUNK, states[r].top, sight(r));
}

// The partial results of a tile's rows over one chunk.
template <class Kv>
void attend_chunk(const Problem& problem, const Tile& tile, const Scratch& scratch, int64_t chunk, Results to) {
    const Rows& rows = scratch.rows;
    const int64_t dim = problem.layout.head_dim, width = problem.layout.value_stride, origin = chunk * CHUNK;
    for (int64_t r = 0; r < rows.count; r++) to.states[r] = {EMPTY, 0.0f};
    memset(to.values, 0, sizeof(float) * rows.count * width);
    const Range all = see_chunk(rows, chunk);
    if (all.begin >= all.end) return;
    const Uses uses = uses_of(problem, tile, chunk, all);
    if constexpr (Kv::SCALED)
        for (int64_t g = 0; g < uses.count; g++) __builtin_prefetch(scales_of(uses.values()[g]));

    const int64_t distance = smaller<int64_t>(AHEAD<Kv>, uses.count);
    auto score_block = [&](const RowBlock& block, Range groups, auto at, auto ahead) {
        float* scores = scratch.scores + block.first * CHUNK + groups.begin * GROUP;
        with_rows(block.count, [&](auto r) {
            score_groups<Kv, decltype(r)::value>(rows.query + block.first * dim, dim, at, ahead, groups.end - groups.begin,
                                                 scores);
        });
    };
    for_each_piece(problem, rows, uses, uses.keys(), distance, score_block);

    for (int64_t b = 0; b < rows.num_blocks; b++)
        if (rows.blocks[b].tokens.begin < rows.blocks[b].tokens.end)
            soften_block<Kv>(rows, rows.blocks[b], origin, uses, scratch.scores, to.states);

    auto weigh_block = [&](const RowBlock& block, Range groups, auto at, auto ahead) {
        const float* weights = scratch.scores + block.first * CHUNK + groups.begin * GROUP;
        // Not a token past the last: nothing has been written there.
        int64_t tokens = smaller(groups.end * GROUP, block.tokens.end) - groups.begin * GROUP;
        with_rows(block.count, [&](auto r) {
            weigh_groups<Kv, decltype(r)::value>(weights, at, ahead, width, tokens, to.values + block.first * width);
        });
    };
    for_each_piece(problem, rows, uses, uses.values(), distance, weigh_block);
}

// The one way in which chunks come together: `state` and `values` hold the chunks before, `next` is the chunk after them.
void merge(RowState& state, float* values, RowState next, const float* next_values, int64_t n) {
    if (next.top == EMPTY && next.total == 0.0f) return;
    if (state.top == EMPTY && state.total == 0.0f) {
        state = next;
        memcpy(values, next_values, sizeof(float) * n);
        return;
    }
    const float top = larger(state.top, next.top);
    const vf factors = exp(where(lane_index() == 0, broadcast(state.top - top), broadcast(next.top - top)));
    const float old = factors[0], fresh = factors[1];
    state = {top, fma(next.total, fresh, state.total * old)};
    for (int64_t i = 0; i < n; i += W)
        store(values + i, fma(load(next_values + i), broadcast(fresh), load(values + i) * broadcast(old)));
}

void finish(const Problem& problem, const Tile& tile, int64_t row, const RowState& state, const float* values) {
    const int64_t dim = problem.layout.head_dim, head = tile.kv_head * problem.group + row % problem.group;
    float* out = problem.out + (tile.first + row / problem.group) * problem.out_stride + head * dim;
    for (int64_t i = 0; i < dim; i++) out[i] = values[i] / state.total;
}

// ---- tasks -------------------------------------------------------------------------------------------------------

// Cut a tile's rows into blocks of nearly equal size and gather their queries.
void gather_rows(const Problem& problem, const Tile& tile, Rows& rows) {
    const int64_t width = problem.group * problem.layout.head_dim;  // of a token's queries
    rows.count = rows_of(problem, tile), rows.num_blocks = ceil_div(rows.count, ROWS);
    for (int64_t b = 0, first = 0; b < rows.num_blocks; b++) {
        rows.blocks[b] = {first, (int)((rows.count - first) / (rows.num_blocks - b)), {0, 0}};
        first += rows.blocks[b].count;
    }
    for (int64_t t = 0; t < tile.count; t++) {
        const float* from = problem.query + (tile.first + t) * problem.query_stride + tile.kv_head * width;
        for (int64_t i = 0; i < width; i++) rows.query[t * width + i] = from[i] * problem.scale;
        const Range seen = visible(problem, tile.position + t);
        for (int64_t h = 0; h < problem.group; h++) rows.visible[t * problem.group + h] = seen;
    }
}

template <class Kv>
void attend(const Problem& problem, const Tile& tile, const Task& task, float* partials, uint8_t* memory) {
    Scratch scratch(memory, problem);
    gather_rows(problem, tile, scratch.rows);
    const int64_t count = scratch.rows.count, width = problem.layout.value_stride;
    if (partials) {
        const int64_t stride = results_floats(problem, Scratch::max_rows(problem));
        for (int64_t chunk = task.first_chunk; chunk < task.last_chunk; chunk++)
            attend_chunk<Kv>(problem, tile, scratch, chunk,
                             results_at(partials + (tile.partial + chunk - tile.first_chunk) * stride, count));
        return;
    }
    const Results whole = results_at(scratch.results, count), part = results_at(scratch.chunk_results, count);
    attend_chunk<Kv>(problem, tile, scratch, task.first_chunk, whole);
    for (int64_t chunk = task.first_chunk + 1; chunk < task.last_chunk; chunk++) {
        attend_chunk<Kv>(problem, tile, scratch, chunk, part);
        for (int64_t r = 0; r < count; r++)
            merge(whole.states[r], whole.values + r * width, part.states[r], part.values + r * width, width);
    }
    for (int64_t r = 0; r < count; r++) finish(problem, tile, r, whole.states[r], whole.values + r * width);
}

void merge_partials(const Problem& problem, const Tile& tile, float* partials) {
    const int64_t count = rows_of(problem, tile), width = problem.layout.value_stride;
    const int64_t stride = results_floats(problem, Scratch::max_rows(problem));
    Results whole = results_at(partials + tile.partial * stride, count);
    for (int64_t c = 1; c < tile.last_chunk - tile.first_chunk; c++) {
        Results next = results_at(partials + (tile.partial + c) * stride, count);
        for (int64_t r = 0; r < count; r++)
            merge(whole.states[r], whole.values + r * width, next.states[r], next.values + r * width, width);
    }
    for (int64_t r = 0; r < count; r++) finish(problem, tile, r, whole.states[r], whole.values + r * width);
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
            tile.last_chunk = (int32_t)ceil_div(visible(problem, last - 1 + offset).end, CHUNK);
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
        partials = (float*)malloc(sizeof(float) * num_partials * results_floats(problem, Scratch::max_rows(problem)));
        if (!partials) return ALLM_NO_MEMORY;
    }
    auto task = [&](int64_t index, uint8_t* scratch) {
        const Tile& tile = tiles.items[tasks.items[index].tile];
        attend<Kv>(problem, tile, tasks.items[index], tile.partial < 0 ? nullptr : partials, scratch);
    };
    int32_t status = parallel_for(pool, tasks.size, Scratch(nullptr, problem).bytes, task);
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
                    out_stride, (const uint8_t*)cache->blocks};
    int32_t status = ALLM_BAD_ARGUMENT;
    with_kv_format(cache->format, [&](auto format) { status = run<decltype(format)>(pool, problem); });
    return status;
}
