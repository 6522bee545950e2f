// What every processor of the architecture runs: plain C++, which the compiler may vectorise for the architecture's base.
#include "../attention/backward.hpp"
#include "../attention/decode.hpp"
#include "../attention/forward.hpp"
#include "../attention/products.hpp"
#include "../attention/vectors_plain.hpp"
#include "../product/depthwise.hpp"
#include "../product/winograd_tiles.hpp"
#include "scalar.hpp"
#include "table.hpp"

namespace opkit::isa {
namespace {

void f32_to_bf16(const float* in, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = narrow_one(in[i]);
}

void pack_b_bf16(const uint16_t* b, int64_t ldb, uint16_t* packed, int64_t n, int64_t k) {
    for (int64_t p = 0; p < k; p += 2) pair_rows(b + p * ldb, p + 1 < k ? b + (p + 1) * ldb : nullptr, packed + p * n, n);
}

// A tile is 3 x 16.
struct ProductVectors : attention::PlainVectors {
    static constexpr int kTileRows = 3, kTilePanels = 1, kRowPanels = 2, kTileSteps = 2;
    static Floats positive(Floats a) { return where(a < zero(), zero(), a); }
};

constexpr Table make_table() {
    Table table{"baseline"};
    table.f32_to_bf16 = f32_to_bf16;
    table.pack_b_bf16 = pack_b_bf16;
    table.transpose_words = attention::transpose_words<attention::PlainVectors>;
    table.attention_f32 = attention::attend<attention::FloatProduct<attention::PlainVectors>>;
    table.attention_cells_f32 = attention::fill_cells<attention::FloatProduct<attention::PlainVectors>>;
    table.attention_backward_f32 = attention::attend_backward<attention::FloatProduct<attention::PlainVectors>>;
    table.attention_bf16 = table.attention_f32;
    table.attention_cells_bf16 = table.attention_cells_f32;
    table.attention_backward_bf16 = table.attention_backward_f32;
    table.attend_decode = attention::attend_decode<attention::PlainVectors>;
    table.product_f32 = product::multiply<ProductVectors>;
    table.depthwise_f32 = product::depthwise<ProductVectors>;
    table.winograd_input_f32 = product::winograd_input<ProductVectors>;
    table.winograd_output_f32 = product::winograd_output<ProductVectors>;
    return table;
}

}  // namespace

extern const Table baseline;
constexpr Table baseline = make_table();

}  // namespace opkit::isa
