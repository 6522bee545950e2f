// AVX-512 as of the first servers that had it (F, BW, DQ, VL).
#if defined(__x86_64__)
#include "../attention/backward.hpp"
#include "../attention/decode.hpp"
#include "../attention/forward.hpp"
#include "../attention/products.hpp"
#include "../attention/vectors_avx512.hpp"
#include "../product/depthwise.hpp"
#include "../product/winograd_tiles.hpp"
#include "table.hpp"
#include "vector_products.hpp"

namespace opkit::isa {
namespace {

// A tile is 12 x 32.
struct ProductVectors : Vectors {
    static constexpr int kTileRows = 12, kTilePanels = 2, kRowPanels = 4, kTileSteps = 4;
    static Floats positive(Floats a) { return _mm512_max_ps(zero(), a); }
};

constexpr Table make_table() {
    Table table{"avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}};
    table.f32_to_bf16 = narrow<Vectors>;
    table.pack_b_bf16 = pack_pairs<Vectors>;
    table.transpose_words = attention::transpose_words<attention::Vectors>;
    table.attention_f32 = attention::attend<attention::FloatProduct<attention::Vectors>>;
    table.attention_cells_f32 = attention::fill_cells<attention::FloatProduct<attention::Vectors>>;
    table.attention_backward_f32 = attention::attend_backward<attention::FloatProduct<attention::Vectors>>;
    table.attention_bf16 = table.attention_f32;
    table.attention_cells_bf16 = table.attention_cells_f32;
    table.attention_backward_bf16 = table.attention_backward_f32;
    table.attend_decode = attention::attend_decode<attention::Vectors>;
    table.product_f32 = product::multiply<ProductVectors>;
    table.depthwise_f32 = product::depthwise<ProductVectors>;
    table.winograd_input_f32 = product::winograd_input<ProductVectors>;
    table.winograd_output_f32 = product::winograd_output<ProductVectors>;
    return table;
}

}  // namespace

extern const Table avx512;
constexpr Table avx512 = make_table();

}  // namespace opkit::isa
#endif
