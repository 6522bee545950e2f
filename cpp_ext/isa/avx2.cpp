// AVX2 with FMA, as all processors with AVX2 have it.
#if defined(__x86_64__)
#include "../attention/backward.hpp"
#include "../attention/decode.hpp"
#include "../attention/forward.hpp"
#include "../attention/products.hpp"
#include "../attention/vectors_avx2.hpp"
#include "../product/depthwise.hpp"
#include "../product/winograd_tiles.hpp"
#include "table.hpp"
#include "vector_products.hpp"

namespace opkit::isa {
namespace {

// A tile is 6 x 16.
struct ProductVectors : Avx2Vectors {
    static constexpr int kTileRows = 6, kTilePanels = 1, kRowPanels = 4, kTileSteps = 2;
    static Floats positive(Floats a) { return _mm256_max_ps(zero(), a); }
};

constexpr Table make_table() {
    Table table{"avx2", {"avx2", "fma"}};
    table.f32_to_bf16 = narrow<Avx2Vectors>;
    table.pack_b_bf16 = pack_pairs<Avx2Vectors>;
    using Attention = attention::Avx2Vectors;
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

extern const Table avx2;
constexpr Table avx2 = make_table();

}  // namespace opkit::isa
#endif
