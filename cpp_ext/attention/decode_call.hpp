// A whole call of decoding attention: what bind_decode.cpp takes from Python.
#pragma once

#include <cstdint>

#include "../isa/table.hpp"
#include "bias.hpp"

namespace opkit::attention {

// type, name. Addresses are integers, 0 where there is none; strides of q, k, v and out are in bytes, others in elements. Either
// `starts` has the number of the first query of each sequence, and of all, or each sequence has `queries` of them. The last size of
// every tensor is contiguous.
//   q, out: [sequence][head][token]; lse: float32, strides lse_*; sinks: float32 of each head, or 0
//   k, v: [page][token][head]; without a page table a page is a sequence; *_scale: float32 likewise, or 0
//   table: int32, numbers of pages, row by row; lengths: int64, keys of each sequence, or 0: `keys` each
//   band: query i sees key j iff lower <= j - i - shift <= upper, where shift is length - queries if `from_end`, else 0
#define OPKIT_DECODE_SHAPE(FIELD)                                                                                       \
    FIELD(int64_t, sequences) FIELD(int64_t, heads) FIELD(int64_t, kv_heads) FIELD(int64_t, queries)                   \
    FIELD(int64_t, keys) FIELD(int64_t, d) FIELD(int64_t, dv) FIELD(int64_t, q_type) FIELD(int64_t, kv_type)           \
    FIELD(int64_t, q_sequence) FIELD(int64_t, q_head) FIELD(int64_t, q_token)                                          \
    FIELD(int64_t, k_page) FIELD(int64_t, k_token) FIELD(int64_t, k_head)                                              \
    FIELD(int64_t, v_page) FIELD(int64_t, v_token) FIELD(int64_t, v_head)                                              \
    FIELD(int64_t, k_scale_page) FIELD(int64_t, k_scale_token) FIELD(int64_t, k_scale_head)                            \
    FIELD(int64_t, v_scale_page) FIELD(int64_t, v_scale_token) FIELD(int64_t, v_scale_head)                            \
    FIELD(int64_t, table_row) FIELD(int64_t, page_size) FIELD(int64_t, pages)                                          \
    FIELD(int64_t, out_sequence) FIELD(int64_t, out_head) FIELD(int64_t, out_token)                                    \
    FIELD(int64_t, lse_sequence) FIELD(int64_t, lse_head) FIELD(int64_t, lse_token)                                    \
    FIELD(int64_t, lower) FIELD(int64_t, upper) FIELD(bool, from_end)                                                  \
    FIELD(double, scale) FIELD(double, softcap)
#define OPKIT_DECODE_ADDRESSES(FIELD)                                                                                   \
    FIELD(int64_t, q) FIELD(int64_t, k) FIELD(int64_t, v) FIELD(int64_t, out) FIELD(int64_t, lse) FIELD(int64_t, sinks) \
    FIELD(int64_t, table) FIELD(int64_t, lengths) FIELD(int64_t, starts) FIELD(int64_t, k_scale) FIELD(int64_t, v_scale)

struct DecodeCall {
#define OPKIT_DECODE_MEMBER(type, name) type name;
    OPKIT_DECODE_SHAPE(OPKIT_DECODE_MEMBER)
    OPKIT_DECODE_ADDRESSES(OPKIT_DECODE_MEMBER)
#undef OPKIT_DECODE_MEMBER
};

// What else is hidden, and what is added to logits, by the positions of queries and keys in their sequence: the first query is at
// `shift` as above.
struct DecodePrograms {
    const Mask* mask;
    const Biases* biases;
    bool by_head;  // whether query heads that share keys see different ones
};

// Throws std::invalid_argument where a length, a start or a page that is needed is out of range; with programs also where a sequence
// has more queries than keys.
void decode(const DecodeCall& call, const isa::Table& kernels, const DecodePrograms* programs = nullptr);

}  // namespace opkit::attention
