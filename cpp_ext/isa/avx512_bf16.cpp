// AVX-512 with VDPBF16PS. The conversions stay those of avx512: see table.hpp on VCVTNEPS2BF16.
#if defined(__x86_64__)
#include "../attention/backward.hpp"
#include "../attention/decode_pairs.hpp"
#include "../attention/forward.hpp"
#include "../attention/pairs_avx512.hpp"
#include "table.hpp"

namespace opkit::isa {
namespace {

constexpr Table make_table() {
    Table table{"avx512_bf16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}};
    table.pair_rows = 12;
    table.attention_bf16 = attention::attend<attention::PairProduct>;
    table.attention_cells_bf16 = attention::fill_cells<attention::PairProduct>;
    table.attention_backward_bf16 = attention::attend_backward<attention::PairProduct>;
    table.attend_decode = attention::attend_decode_pairs;
    return table;
}

}  // namespace

extern const Table avx512_bf16;
constexpr Table avx512_bf16 = make_table();

}  // namespace opkit::isa
#endif
