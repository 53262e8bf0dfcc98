// All storage formats of weights by their ids: those that are multiplied in fp32, and those multiplied in integers.
#pragma once

#include "formats_gguf.h"
#include "formats_integer.h"
#include "panels.h"

namespace allm {

constexpr bool is_integer(int32_t id) { return id >= ALLM_INTEGER; }

// Call body(Format{}) with the quantized format of this id; false if there is none.
template <class Body>
ALLM_INLINE bool with_gguf_format(int32_t id, Body&& body) {
    switch (id) {
        case ALLM_Q8_0: body(Q8_0{}); return true;
        case ALLM_Q4_0: body(Q4_0{}); return true;
        case ALLM_Q4_1: body(Q4_1{}); return true;
        case ALLM_Q4_K: body(Q4_K{}); return true;
        case ALLM_Q5_K: body(Q5_K{}); return true;
        case ALLM_Q6_K: body(Q6_K{}); return true;
        case ALLM_Q5_0: body(Q5_0{}); return true;
        case ALLM_Q5_1: body(Q5_1{}); return true;
        case ALLM_Q2_K: body(Q2_K{}); return true;
        case ALLM_Q3_K: body(Q3_K{}); return true;
        default: return false;
    }
}

// The same for formats that are multiplied in fp32.
template <class Body>
ALLM_INLINE bool with_float_format(int32_t id, Body&& body) {
    switch (id) {
        case ALLM_F32: body(F32{}); return true;
        case ALLM_BF16: body(BF16{}); return true;
        case ALLM_F16: body(F16{}); return true;
        default: return with_gguf_format(id, body);
    }
}

// The same for formats that are multiplied in integers.
template <class Body>
ALLM_INLINE bool with_integer_format(int32_t id, Body&& body) {
    return with_gguf_format(id - ALLM_INTEGER, [&](auto f) ALLM_LAMBDA_INLINE { body(Integer<decltype(f)>{}); });
}

template <class Body>
ALLM_INLINE bool with_format(int32_t id, Body&& body) {
    return is_integer(id) ? with_integer_format(id, body) : with_float_format(id, body);
}

// How many k come together in a source: what K must be a multiple of.
template <class Format>
constexpr int source_block() {
    if constexpr (Format::QUANTIZED) return Format::SOURCE_BLOCK;
    else return 1;
}

template <class Format>
ALLM_INLINE int64_t panel_bytes(int64_t k) {
    return ceil_div(k, Format::BLOCK) * Format::BYTES;
}

}  // namespace allm
