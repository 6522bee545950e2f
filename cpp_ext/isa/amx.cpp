// AMX with TDPBF16PS: tiles of 16 rows of 64 bytes (amx_tiles.hpp).
#if defined(__x86_64__)
#include "../attention/amx_backward.hpp"
#include "../attention/amx_forward.hpp"
#include "amx_tiles.hpp"
#include "table.hpp"

#if defined(OPKIT_EMULATED_TILES)  // by tests/cpp/driver: tiles in memory
#define OPKIT_TILE_FEATURES
#else
#define OPKIT_TILE_FEATURES "amx_tile", "amx_bf16",
#endif

namespace opkit::isa {
namespace {

constexpr Table make_table() {
    Table table{"amx", {OPKIT_TILE_FEATURES "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
                tiles_are_permitted, attention::amx::kRows};
    table.attention_bf16 = attention::amx::attend;
    table.attention_cells_bf16 = attention::amx::fill_rows;
    table.attention_backward_bf16 = attention::amx::attend_backward;
    return table;
}

}  // namespace

extern const Table amx;
constexpr Table amx = make_table();

}  // namespace opkit::isa
#endif
