// The C interface of the native CPU kernels: plain C types and raw pointers, so that one binary serves every Python and
// every torch. Nothing here keeps a pointer after the call returns, except an allm_pool its own threads.
//
// Letters: T new tokens of the step, B rows (requests), H query heads, KV key/value heads, D head dim, S block size,
// N x K a weight of N outputs and K inputs, M rows of an activation matrix.
//
// Invariant of every function here: each output element is reduced in one fixed order that depends only on its own row
// (its position for attention), never on M, on the other rows, on how a prompt was cut into chunks, on the number of
// threads or on the vector width. So results are equal bit for bit whatever shares the step.
//
// All functions that can fail return 0 for success or a negative allm_status. A pool may be null: the caller's thread
// then does all the work. Calls on one pool from several threads are safe; the second one runs on its own thread alone.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ALLM_ABI_VERSION 3
#define ALLM_API __attribute__((visibility("default")))

enum allm_status { ALLM_OK = 0, ALLM_NO_MEMORY = -1, ALLM_BAD_ARGUMENT = -2 };

// How numbers are stored. The arithmetic is fp32, or exact integers for a weight in a format plus ALLM_INTEGER.
enum allm_format {
    ALLM_F32 = 0,
    ALLM_BF16 = 1,
    ALLM_F16 = 2,
    ALLM_Q8_0 = 3,  // GGUF: 32 int8 and one fp16 scale
    ALLM_Q4_0 = 4,  // GGUF: 32 nibbles and one fp16 scale
    ALLM_Q4_1 = 5,  // GGUF: 32 nibbles, one fp16 scale and one fp16 minimum
    ALLM_Q4_K = 6,  // GGUF: 256 nibbles, 8 scales and 8 minima of 6 bits, an fp16 factor for each
    ALLM_Q5_K = 7,  // GGUF: the same with 5 bits
    ALLM_Q6_K = 8,  // GGUF: 256 numbers of 6 bits, 16 int8 scales, their fp16 factor
    ALLM_Q5_0 = 9,  // GGUF: 32 numbers of 5 bits and one fp16 scale
    ALLM_Q5_1 = 10, // GGUF: the same and one fp16 minimum
    ALLM_Q2_K = 11, // GGUF: 256 numbers of 2 bits, 16 scales and 16 minima of 4 bits, an fp16 factor for each
    ALLM_Q3_K = 12, // GGUF: 256 numbers of 3 bits, 16 scales of 6 bits, their fp16 factor
    ALLM_KV_I8 = 32,  // keys and values only: int8 with an fp32 scale for each token and head
    // Added to a quantized format: the same numbers and factors, multiplied with activations of 16 bits in integers. K may
    // be any number for Q8_0 and Q4_1, whose last group is filled up with zeros.
    ALLM_INTEGER = 64,
};

enum allm_activation { ALLM_NONE = 0, ALLM_RELU = 1, ALLM_SILU = 2, ALLM_GELU_TANH = 3, ALLM_GELU = 4 };

enum allm_norm_kind { ALLM_NORM_NONE = 0, ALLM_NORM_RMS = 1, ALLM_NORM_LAYER = 2 };

// ---- the library -------------------------------------------------------------------------------------------------

ALLM_API int32_t allm_abi_version(void);
ALLM_API const char* allm_isa(void);       // what this build was compiled for: "x86-64-v4", "x86-64-v3", "neon", "generic"
ALLM_API const char* allm_best_isa(void);  // the best of those that this machine runs (asks cpuid)

// Whether integer products use the one instruction that multiplies and adds pairs (AVX-512 VNNI, AVX-VNNI). wanted: 1 use it
// where the machine has it, 0 do not, -1 only ask. Results are the same; for tests and benchmarks.
ALLM_API int32_t allm_fused_dot(int32_t wanted);

// ---- threads (threads.cpp) ---------------------------------------------------------------------------------------

typedef struct allm_pool allm_pool;

// num_threads counts the caller's own thread. spin_us: how long an idle worker spins before it sleeps. Null: no memory.
ALLM_API allm_pool* allm_pool_create(int32_t num_threads, int32_t spin_us);
ALLM_API void allm_pool_destroy(allm_pool* pool);
ALLM_API int32_t allm_pool_num_threads(const allm_pool* pool);

// ---- probes (probe.cpp): what this machine can do, for benchmarks ------------------------------------------------

ALLM_API int64_t allm_probe_multiply_add(allm_pool* pool, int64_t rounds);                 // returns operations done
ALLM_API int64_t allm_probe_read(allm_pool* pool, const void* memory, int64_t bytes);      // returns bytes read

// ---- packed weights (pack.cpp, gemm.cpp, gemm_integer.cpp) -------------------------------------------------------------------------

// One linear layer: `weight` holds panels made by allm_pack_rows in the same build of the library.
typedef struct allm_linear {
    const void* weight;  // null: there is no such layer
    const float* bias;   // [n], or null
    int64_t n, k;
    int32_t format;
    int32_t reserved;
} allm_linear;

ALLM_API int64_t allm_packed_bytes(int32_t format, int64_t n, int64_t k);  // negative: k does not fit the format
// Pack `rows` rows of row-major `source` (GGUF: rows of blocks) as the rows from `first_row` on of an n x k weight.
// source_format is that of `format` without ALLM_INTEGER, or one of F32, BF16, F16 where format is one of these or Q8_0 or
// Q4_1 (with or without ALLM_INTEGER): then the rows are quantized. `packed` must be zeroed before its first rows come.
ALLM_API int32_t allm_pack_rows(allm_pool* pool, int32_t format, void* packed, int64_t n, int64_t k, int64_t first_row,
                                int64_t rows, int32_t source_format, const void* source);
// out[i, :] = scale * row ids[i] of the weight, in fp32: the embedding lookup, also from a packed (tied) head.
ALLM_API int32_t allm_gather_rows(allm_pool* pool, const allm_linear* weight, const int64_t* ids, int64_t num_ids,
                                  float scale, float* out, int64_t out_stride);
// y[m, :] = x[m, :] @ weight.T + bias
ALLM_API int32_t allm_linear_forward(allm_pool* pool, const allm_linear* linear, const float* x, int64_t x_stride,
                                     float* y, int64_t y_stride, int64_t m);
// y[m, :] = activation(x[m] @ gate.T) * (x[m] @ up.T); with gate->weight null: activation(x[m] @ up.T)
ALLM_API int32_t allm_gated_linear_forward(allm_pool* pool, const allm_linear* gate, const allm_linear* up,
                                           int32_t activation, const float* x, int64_t x_stride, float* y,
                                           int64_t y_stride, int64_t m);
// best[m] = argmax of the logits of row m, ties and NaN as torch.argmax, and best_logits[m] that logit; the logits of all
// columns only if `logits` is not null. Each of the three may be null.
ALLM_API int32_t allm_head_forward(allm_pool* pool, const allm_linear* head, const float* x, int64_t x_stride,
                                   float* logits, int64_t logits_stride, int64_t* best, float* best_logits, int64_t m);

// ---- norms and activations (norm.cpp, activation.cpp) ------------------------------------------------------------

typedef struct allm_norm {
    const float* weight;  // [n], or null for ones
    const float* bias;    // [n], or null
    float eps;
    int32_t kind;  // allm_norm_kind
} allm_norm;

// x += residual (if not null); y = norm(x). y may be x. Rows of n elements.
ALLM_API int32_t allm_add_norm(allm_pool* pool, const allm_norm* norm, float* x, int64_t x_stride, const float* residual,
                               int64_t residual_stride, float* y, int64_t y_stride, int64_t m, int64_t n);
// y = activation(gate) * up, or activation(gate) where up is null.
ALLM_API int32_t allm_activate(allm_pool* pool, int32_t activation, const float* gate, int64_t gate_stride,
                               const float* up, int64_t up_stride, float* y, int64_t y_stride, int64_t m, int64_t n);

// ---- rotary positions and the KV cache (rotary.cpp) --------------------------------------------------------------

// Block b of a layer's cache holds, for each KV head, ceil(S / 16) groups of keys and then as many groups of values. A group
// is 16 tokens: keys as [D][16], so that scores need no horizontal sums, values as [16][Dv], where Dv is D rounded up to 16.
// With ALLM_KV_I8 each group begins with the 16 fp32 scales of its tokens (greatest magnitude / 127). A head takes whole cache
// lines. Where S is not a multiple of 16 the rest of a block's last group is a hole: memory that no token uses.
typedef struct allm_kv_cache {
    void* blocks;
    int32_t format;      // ALLM_F32, ALLM_BF16, ALLM_F16 or ALLM_KV_I8
    int32_t block_size;
    int32_t num_kv_heads;
    int32_t head_dim;
} allm_kv_cache;

ALLM_API int64_t allm_kv_block_bytes(const allm_kv_cache* cache);  // negative: a size or the format is not supported

typedef struct allm_rotary {
    const float* cos;  // [max_position, dim / 2]
    const float* sin;
    int32_t dim;          // the first `dim` elements of a head are rotated; 0: none
    int32_t interleaved;  // 0: pairs (i, i + dim / 2), 1: pairs (2 i, 2 i + 1)
} allm_rotary;

// Rotate (and norm, where a kind is set) query [T, H, D] and key [T, KV, D] in place; write key and value to their slots.
// query may be null (nothing to rotate). slots[t] = block * S + offset; a negative slot is not written.
ALLM_API int32_t allm_rotate_and_write(allm_pool* pool, const allm_kv_cache* cache, const allm_rotary* rotary,
                                       const allm_norm* query_norm, const allm_norm* key_norm, float* query,
                                       int64_t query_stride, int32_t num_heads, float* key, int64_t key_stride,
                                       const float* value, int64_t value_stride, const int64_t* positions,
                                       const int64_t* slots, int64_t num_tokens);
// The reverse, for tests and for moving blocks: key, value [count, KV, D] out of the slots.
ALLM_API int32_t allm_read_kv(const allm_kv_cache* cache, const int64_t* slots, int64_t count, float* key, float* value);

// ---- attention (attention.cpp) -----------------------------------------------------------------------------------

// Row b has new tokens query_start[b] … query_start[b + 1] - 1 at the end of its seq_lens[b] tokens; each attends causally.
typedef struct allm_batch {
    int32_t num_tokens, num_seqs;
    const int64_t* token_ids;    // [T]
    const int64_t* positions;    // [T]
    const int64_t* slots;        // [T]
    const int32_t* query_start;  // [B + 1]
    const int32_t* seq_lens;     // [B]
    const int32_t* block_table;  // [B, block_table_stride]
    int64_t block_table_stride;
} allm_batch;

// out [T, H * D]; window: a token sees itself and window - 1 before it, 0 for all.
ALLM_API int32_t allm_paged_attention(allm_pool* pool, const allm_kv_cache* cache, const allm_batch* batch,
                                      const float* query, int64_t query_stride, int32_t num_heads, float scale,
                                      int32_t window, float* out, int64_t out_stride);

// ---- drawing tokens (sample.cpp) ---------------------------------------------------------------------------------

typedef struct allm_sampling {
    float temperature;  // 0: the greatest logit
    float top_p;        // in (0, 1]
    float min_p;
    int32_t top_k;  // 0: all
    uint64_t seed;
    int64_t sample_index;
} allm_sampling;

// ids[r] = a token of row r, best[r] = its greatest logit. The number that decides is Philox4x32-10 of the row's seed, sample
// index and output position. A row whose greatest logit is not finite has no valid token; ids[r] is then that logit's column.
ALLM_API int32_t allm_draw_tokens(allm_pool* pool, const float* logits, int64_t logits_stride, int64_t vocabulary,
                                  const allm_sampling* samplings, const int64_t* positions, int64_t* ids, float* best,
                                  int64_t rows);

// ---- a whole decoder (step.cpp) ----------------------------------------------------------------------------------

typedef struct allm_layer {
    allm_norm attention_norm;  // before attention; after its residual where the decoder is post-norm
    allm_linear q, k, v;
    allm_norm q_norm, k_norm;  // per head, before the rotation
    allm_linear o;
    allm_norm attention_out_norm;  // on the attention's output, before the residual (Gemma)
    allm_norm mlp_norm;
    allm_linear gate, up, down;  // gate.weight null: not gated
    allm_norm mlp_out_norm;
    allm_rotary rotary;
    float attention_scale;
    int32_t window;
} allm_layer;

typedef struct allm_decoder {
    int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, block_size;
    int32_t kv_format;
    int32_t activation;
    int32_t post_norm;  // 1: norms come after the residuals (OPT-350m)
    int32_t position_offset;
    float embedding_scale;
    int32_t reserved;
    allm_linear embedding;            // packed rows of the vocabulary; may be the head's own pointer
    const float* position_embedding;  // [max_position + offset, hidden_size] learned positions, or null
    allm_linear project_in, project_out;
    allm_norm final_norm;
    allm_linear head;
    const allm_layer* layers;
} allm_decoder;

typedef struct allm_step_output {
    const int32_t* sample_rows;  // [R] rows of the flat batch that sample
    int64_t num_sample_rows;
    float* hidden;          // [T, hidden_size] final hidden states of every token, or null
    float* logits;          // [R, vocabulary], or null
    int64_t logits_stride;
    int64_t* best;          // [R] greedy token, or null
} allm_step_output;

ALLM_API int64_t allm_decoder_workspace_bytes(const allm_decoder* decoder, int64_t num_tokens, int64_t num_sample_rows);
// One forward of all layers over the flat batch: writes the KV of the new tokens, fills what `output` asks for.
// kv_blocks[l] is layer l's cache. workspace: at least allm_decoder_workspace_bytes, aligned to 64.
ALLM_API int32_t allm_decoder_step(allm_pool* pool, const allm_decoder* decoder, void* const* kv_blocks,
                                   const allm_batch* batch, const allm_step_output* output, void* workspace);

#ifdef __cplusplus
}
#endif
