// What every processor of the architecture runs: plain C++, which the compiler may vectorise for the architecture's base.
#include "../attention/backward.hpp"
#include "../attention/decode.hpp"
#include "../attention/forward.hpp"
#include "../attention/products.hpp"
#include "../attention/vectors_plain.hpp"
#include "scalar.hpp"
#include "table.hpp"

namespace opkit::isa {
namespace {

void bf16_to_f32(const uint16_t* in, float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = widen_one(in[i]);
}

void f32_to_bf16(const float* in, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_one(in[i]);
}

void pack_b_bf16(const uint16_t* b, int64_t ldb, uint16_t* packed, int64_t n, int64_t k) {
    for (int64_t p = 0; p < k; p += 2) pair_rows(b + p * ldb, p + 1 < k ? b + (p + 1) * ldb : nullptr, packed + p * n, n);
}

void add_pair(float even, float odd, const uint16_t* pairs, float* c, int64_t n) {
    for (int64_t j = 0; j < n; ++j) c[j] += even * widen_one(pairs[2 * j]) + odd * widen_one(pairs[2 * j + 1]);
}

void gemm_block_bf16(const uint16_t* a, int64_t lda, const uint16_t* b_packed, float* c, int64_t ldc, int64_t m, int64_t n,
                     int64_t k) {
    for (int64_t i = 0; i < m; ++i, a += lda, c += ldc)
        for (int64_t p = 0; p < k; p += 2)
            add_pair(widen_one(a[p]), p + 1 < k ? widen_one(a[p + 1]) : 0.0f, b_packed + p * n, c, n);
}

void gemm_block_f32(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m, int64_t n,
                    int64_t k) {
    for (int64_t i = 0; i < m; ++i, a += lda, c += ldc)
        for (int64_t p = 0; p < k; ++p)
            for (int64_t j = 0; j < n; ++j) c[j] += a[p] * b[p * ldb + j];
}

constexpr Table make_table() {
    Table table{"baseline"};
    table.pair_rows = 12;
    table.bf16_to_f32 = bf16_to_f32;
    table.f32_to_bf16 = f32_to_bf16;
    table.pack_b_bf16 = pack_b_bf16;
    table.gemm_block_bf16 = gemm_block_bf16;
    table.gemm_block_f32 = gemm_block_f32;
    table.transpose_words = attention::transpose_words<attention::PlainVectors>;
    table.attention_f32 = attention::attend<attention::FloatProduct<attention::PlainVectors>>;
    table.attention_cells_f32 = attention::fill_cells<attention::FloatProduct<attention::PlainVectors>>;
    table.attention_backward_f32 = attention::retreat<attention::FloatProduct<attention::PlainVectors>>;
    table.attention_bf16 = attention::attend<attention::WidenedProduct<attention::PlainVectors>>;
    table.attention_cells_bf16 = attention::fill_cells<attention::WidenedProduct<attention::PlainVectors>>;
    table.attention_backward_bf16 = attention::retreat<attention::WidenedProduct<attention::PlainVectors>>;
    table.attend_decode = attention::attend_decode<attention::PlainVectors>;
    return table;
}

}  // namespace

extern const Table baseline;
constexpr Table baseline = make_table();

}  // namespace opkit::isa
