// A whole decoder over a flat batch in one call: embedding, layers, final norm, head. The operators are those of the other
// files; this one only puts them in order and gives them memory.
#include "gemm.h"
#include "norm.h"
#include "simd.h"
#include "threads.h"

namespace allm {
namespace {

// The buffers of a step inside the caller's workspace. Rows are padded to whole cache lines.
struct Buffers {
    int64_t hidden_stride, qkv_stride, attention_stride, mlp_stride;
    float *hidden, *normed, *output, *qkv, *attention, *mlp, *sampled;
    int64_t bytes;

    Buffers(const allm_decoder& decoder, int64_t tokens, int64_t samples, void* workspace) {
        int64_t q = (int64_t)decoder.num_heads * decoder.head_dim, kv = (int64_t)decoder.num_kv_heads * decoder.head_dim;
        int64_t mlp_size = 0;
        for (int32_t l = 0; l < decoder.num_layers; l++) mlp_size = larger(mlp_size, decoder.layers[l].up.n);
        hidden_stride = round_up(larger(larger<int64_t>(decoder.hidden_size, decoder.embedding.k), decoder.head.k), 16);
        qkv_stride = round_up(q + 2 * kv, 16);
        attention_stride = round_up(q, 16);
        mlp_stride = round_up(mlp_size, 16);
        int64_t used = 0;
        auto take = [&](int64_t rows, int64_t stride) {
            float* taken = (float*)workspace + used;
            used += rows * stride;
            return taken;
        };
        hidden = take(tokens, hidden_stride);
        normed = take(tokens, hidden_stride);
        output = take(tokens, hidden_stride);
        qkv = take(tokens, qkv_stride);
        attention = take(tokens, attention_stride);
        mlp = take(tokens, mlp_stride);
        sampled = take(samples, hidden_stride);
        bytes = used * (int64_t)sizeof(float);
    }
};

// Operations run one after the other as long as each succeeds.
struct Step {
    allm_pool* pool;
    const allm_decoder& decoder;
    const allm_batch& batch;
    Buffers buffers;
    int64_t tokens;
    int32_t status;

    void run(void* const* kv_blocks, const allm_step_output& output);
    void embed();
    void attention(const allm_layer& layer, const float* input, void* kv_blocks);
    void mlp(const allm_layer& layer, const float* input);
    void norm(const allm_norm& norm, float* x, const float* residual, float* y, int64_t rows);
    void linear(const allm_linear& linear, const float* x, int64_t x_stride, float* y, int64_t rows);
    void final_hidden(float* x, int64_t rows, float* y, int64_t y_stride);
    void finish(const allm_step_output& output);

    template <class Operation>
    void then(Operation&& operation) {
        if (status == ALLM_OK) status = operation();
    }
};

// y = norm(x += residual), rows of hidden_size in buffers of hidden_stride
void Step::norm(const allm_norm& norm, float* x, const float* residual, float* y, int64_t rows) {
    const int64_t stride = buffers.hidden_stride;
    then([&] { return add_norm(pool, norm, x, stride, residual, stride, y, stride, rows, decoder.hidden_size); });
}

void Step::linear(const allm_linear& linear, const float* x, int64_t x_stride, float* y, int64_t rows) {
    then([&] { return allm_linear_forward(pool, &linear, x, x_stride, y, buffers.hidden_stride, rows); });
}

void Step::embed() {
    const int64_t stride = buffers.hidden_stride;
    float* to = decoder.project_in.weight ? buffers.output : buffers.hidden;
    then([&] {
        return allm_gather_rows(pool, &decoder.embedding, batch.token_ids, tokens, decoder.embedding_scale, to, stride);
    });
    if (decoder.project_in.weight) linear(decoder.project_in, to, stride, buffers.hidden, tokens);
    if (!decoder.position_embedding) return;
    auto rows = [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            int64_t index = batch.positions[t] + decoder.position_offset;
            const float* added = decoder.position_embedding + index * decoder.hidden_size;
            float* row = buffers.hidden + t * stride;
            for (int64_t i = 0; i < decoder.hidden_size; i++) row[i] += added[i];
        }
    };
    then([&] { return parallel_rows(pool, tokens, 8, rows); });
}

// buffers.output = attention of input
void Step::attention(const allm_layer& layer, const float* input, void* kv_blocks) {
    const int64_t stride = buffers.qkv_stride;
    float *query = buffers.qkv, *key = query + layer.q.n, *value = key + layer.k.n;
    Product products[3] = {{&layer.q, query, stride}, {&layer.k, key, stride}, {&layer.v, value, stride}};
    allm_kv_cache cache{kv_blocks, decoder.kv_format, decoder.block_size, decoder.num_kv_heads, decoder.head_dim};
    then([&] { return multiply_group(pool, input, buffers.hidden_stride, tokens, products, 3); });
    then([&] {
        return allm_rotate_and_write(pool, &cache, &layer.rotary, &layer.q_norm, &layer.k_norm, query, stride, decoder.num_heads,
                                     key, stride, value, stride, batch.positions, batch.slots, tokens);
    });
    then([&] {
        return allm_paged_attention(pool, &cache, &batch, query, stride, decoder.num_heads, layer.attention_scale, layer.window,
                                    buffers.attention, buffers.attention_stride);
    });
    linear(layer.o, buffers.attention, buffers.attention_stride, buffers.output, tokens);
    if (layer.attention_out_norm.kind) norm(layer.attention_out_norm, buffers.output, nullptr, buffers.output, tokens);
}

// buffers.output = mlp of input
void Step::mlp(const allm_layer& layer, const float* input) {
    then([&] {
        return allm_gated_linear_forward(pool, &layer.gate, &layer.up, decoder.activation, input, buffers.hidden_stride,
                                         buffers.mlp, buffers.mlp_stride, tokens);
    });
    linear(layer.down, buffers.mlp, buffers.mlp_stride, buffers.output, tokens);
    if (layer.mlp_out_norm.kind) norm(layer.mlp_out_norm, buffers.output, nullptr, buffers.output, tokens);
}

constexpr allm_norm NO_NORM{nullptr, nullptr, 0.0f, ALLM_NORM_NONE};

// Pre-norm:  hidden += f(norm(hidden)).   Post-norm:  hidden = norm(hidden + f(hidden)).
void Step::run(void* const* kv_blocks, const allm_step_output& output) {
    float *hidden = buffers.hidden, *input = decoder.post_norm ? hidden : buffers.normed;
    embed();
    if (!decoder.post_norm && decoder.num_layers) norm(decoder.layers[0].attention_norm, hidden, nullptr, input, tokens);
    for (int32_t l = 0; l < decoder.num_layers && status == ALLM_OK; l++) {
        const allm_layer& layer = decoder.layers[l];
        attention(layer, input, kv_blocks[l]);
        norm(decoder.post_norm ? layer.attention_norm : layer.mlp_norm, hidden, buffers.output, input, tokens);
        mlp(layer, input);
        bool last = l + 1 == decoder.num_layers;
        const allm_norm& next = decoder.post_norm ? layer.mlp_norm : last ? NO_NORM : decoder.layers[l + 1].attention_norm;
        norm(next, hidden, buffers.output, last ? hidden : input, tokens);
    }
    finish(output);
}

// y = the final norm and projection of x; x is overwritten
void Step::final_hidden(float* x, int64_t rows, float* y, int64_t y_stride) {
    norm(decoder.final_norm, x, nullptr, x, rows);
    then([&] {
        if (decoder.project_out.weight)
            return allm_linear_forward(pool, &decoder.project_out, x, buffers.hidden_stride, y, y_stride, rows);
        for (int64_t r = 0; r < rows && x != y; r++)
            memcpy(y + r * y_stride, x + r * buffers.hidden_stride, sizeof(float) * decoder.hidden_size);
        return (int32_t)ALLM_OK;
    });
}

void gather(const float* from, int64_t from_stride, const int32_t* rows, int64_t count, float* to, int64_t to_stride, int64_t n) {
    for (int64_t r = 0; r < count; r++) memcpy(to + r * to_stride, from + rows[r] * from_stride, sizeof(float) * n);
}

void Step::finish(const allm_step_output& output) {
    const int64_t samples = output.num_sample_rows, stride = buffers.hidden_stride, width = decoder.head.k;
    if (status != ALLM_OK) return;
    float *sampled = buffers.sampled, *projected = buffers.output;  // with project_out x and y must not be the same
    if (output.hidden) {
        final_hidden(buffers.hidden, tokens, output.hidden, width);
        gather(output.hidden, width, output.sample_rows, samples, projected, stride, width);
    } else {
        gather(buffers.hidden, stride, output.sample_rows, samples, sampled, stride, decoder.hidden_size);
        projected = decoder.project_out.weight ? buffers.output : sampled;
        final_hidden(sampled, samples, projected, stride);
    }
    if (!output.logits && !output.best) return;
    then([&] {
        return allm_head_forward(pool, &decoder.head, projected, stride, output.logits, output.logits_stride, output.best, nullptr,
                                 samples);
    });
}

bool is_valid(const allm_decoder& decoder, const allm_batch& batch, const allm_step_output& output) {
    bool sizes = decoder.num_layers >= 0 && decoder.hidden_size > 0 && batch.num_tokens >= 0 && batch.num_seqs >= 0;
    for (int64_t r = 0; r < output.num_sample_rows; r++)
        if (output.sample_rows[r] < 0 || output.sample_rows[r] >= batch.num_tokens) return false;
    return sizes && output.num_sample_rows <= batch.num_tokens && decoder.embedding.weight && decoder.head.weight;
}

}  // namespace
}  // namespace allm

using namespace allm;

int64_t allm_decoder_workspace_bytes(const allm_decoder* decoder, int64_t num_tokens, int64_t num_sample_rows) {
    return Buffers(*decoder, num_tokens, num_sample_rows, nullptr).bytes;
}

int32_t allm_decoder_step(allm_pool* pool, const allm_decoder* decoder, void* const* kv_blocks, const allm_batch* batch,
                          const allm_step_output* output, void* workspace) {
    if (!is_valid(*decoder, *batch, *output)) return ALLM_BAD_ARGUMENT;
    if (batch->num_tokens == 0) return ALLM_OK;
    Buffers buffers(*decoder, batch->num_tokens, output->num_sample_rows, workspace);
    Step step{pool, *decoder, *batch, buffers, batch->num_tokens, ALLM_OK};
    step.run(kv_blocks, *output);
    return step.status;
}
