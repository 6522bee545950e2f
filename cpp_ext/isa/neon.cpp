// NEON, which every 64-bit Arm processor has.
#if defined(__aarch64__)
#include "../attention/backward.hpp"
#include "../attention/decode.hpp"
#include "../attention/forward.hpp"
#include "../attention/products.hpp"
#include "../attention/vectors_neon.hpp"
#include "../product/depthwise.hpp"
#include "../product/winograd_tiles.hpp"
#include "table.hpp"
#include "vector_products.hpp"

namespace opkit::isa {
namespace {

// A tile is 6 x 16.
struct ProductVectors : NeonVectors {
    static constexpr int kTileRows = 6, kTilePanels = 1, kRowPanels = 4, kTileSteps = 4;
    static Floats positive(Floats a) { return vbslq_f32(vcltq_f32(a, zero()), zero(), a); }
};

constexpr Table make_table() {
    Table table{"neon", {"neon"}};
    table.f32_to_bf16 = narrow<NeonVectors>;
    table.pack_b_bf16 = pack_pairs<NeonVectors>;
    using Attention = attention::NeonVectors;
    table.transpose_words = attention::transpose_words<Attention>;
    table.attention_f32 = attention::attend<attention::FloatProduct<Attention>>;
    table.attention_cells_f32 = attention::fill_cells<attention::FloatProduct<Attention>>;
    table.attention_backward_f32 = attention::attend_backward<attention::FloatProduct<Attention>>;
    table.attention_bf16 = table.attention_f32;
    table.attention_cells_bf16 = table.attention_cells_f32;
    table.attention_backward_bf16 = table.attention_backward_f32;
    table.attend_decode = attention::attend_decode<Attention>;
    table.product_f32 = product::multiply<ProductVectors>;
    table.depthwise_f32 = product::depthwise<ProductVectors>;
    table.winograd_input_f32 = product::winograd_input<ProductVectors>;
    table.winograd_output_f32 = product::winograd_output<ProductVectors>;
    return table;
}

}  // namespace

extern const Table neon;
constexpr Table neon = make_table();

}  // namespace opkit::isa
#endif
