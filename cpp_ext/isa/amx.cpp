// AMX with TDPBF16PS: tiles of 16 rows of 64 bytes. Tiles 0 to 3 are sums (2 x 2), 4 and 5 rows of a, 6 and 7 columns of b.
// The configuration says how many rows and columns each tile has, so the edges of c need no copies.
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

void configure(int64_t rows, int64_t cols) {
    Configuration tiles;
    for (int64_t i = 0; i < 2 && rows > kTile * i; ++i) tiles.set(4 + i, rows - kTile * i, kTile);
    for (int64_t j = 0; j < 2 && cols > kTile * j; ++j) tiles.set(6 + j, kTile, cols - kTile * j);
    for (int64_t i = 0; i < 2 && rows > kTile * i; ++i)
        for (int64_t j = 0; j < 2 && cols > kTile * j; ++j) tiles.set(2 * i + j, rows - kTile * i, cols - kTile * j);
    tiles.load();
}

// One tile of k: ROWS x COLS products. lda and pitch are in bytes.
template <int ROWS, int COLS>
inline __attribute__((always_inline)) void multiply(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t pitch) {
    _tile_loadd(6, b, pitch);
    _tile_loadd(4, a, lda);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (COLS == 2) {
        _tile_loadd(7, b + 2 * kTile, pitch);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (ROWS == 2) {
        _tile_loadd(5, a + kTile * (lda / 2), lda);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (COLS == 2) _tile_dpbf16ps(3, 5, 7);
    }
}

struct Edge {  // the last k, fewer than a tile holds, padded with zeros
    alignas(64) uint16_t a[2 * kTile][kTileK];
    alignas(64) uint16_t b[kTileK / 2][2 * kTile][2];
};

struct Block {  // a block of c of at most two by two tiles; pitch is the distance of two rows of pairs, in uint16_t
    int64_t rows, cols;
    const uint16_t* a;
    int64_t lda;
    const uint16_t* b;
    int64_t pitch;
    float* c;
    int64_t ldc, k;
};

void copy_edge(Edge& edge, const Block& block, int64_t done) {
    const int64_t k = block.k - done;
    for (int64_t i = 0; i < block.rows; ++i) {
        __builtin_memset(edge.a[i], 0, sizeof edge.a[i]);
        __builtin_memcpy(edge.a[i], block.a + i * block.lda + done, static_cast<size_t>(k) * 2);
    }
    __builtin_memset(edge.b, 0, sizeof edge.b);
    for (int64_t p = 0; 2 * p < k; ++p)
        __builtin_memcpy(edge.b[p], block.b + (done / 2 + p) * block.pitch, static_cast<size_t>(block.cols) * 4);
    stores_are_done();
}

template <int ROWS, int COLS>
void multiply_block(const Block& block) {
    const auto& [rows, cols, a, lda, b, pitch, c, ldc, k] = block;
    float* const below = c + kTile * ldc;
    _tile_loadd(0, c, 4 * ldc);
    if constexpr (COLS == 2) _tile_loadd(1, c + kTile, 4 * ldc);
    if constexpr (ROWS == 2) _tile_loadd(2, below, 4 * ldc);
    if constexpr (ROWS == 2 && COLS == 2) _tile_loadd(3, below + kTile, 4 * ldc);
    int64_t p = 0;
    for (; p + kTileK <= k; p += kTileK) multiply<ROWS, COLS>(a + p, 2 * lda, b + p / 2 * pitch, 2 * pitch);
    if (p < k) {
        Edge edge;
        copy_edge(edge, block, p);
        multiply<ROWS, COLS>(edge.a[0], sizeof edge.a[0], edge.b[0][0], sizeof edge.b[0]);
    }
    _tile_stored(0, c, 4 * ldc);
    if constexpr (COLS == 2) _tile_stored(1, c + kTile, 4 * ldc);
    if constexpr (ROWS == 2) _tile_stored(2, below, 4 * ldc);
    if constexpr (ROWS == 2 && COLS == 2) _tile_stored(3, below + kTile, 4 * ldc);
}

constexpr void (*kBlocks[2][2])(const Block&) = {{multiply_block<1, 1>, multiply_block<1, 2>},
                                                 {multiply_block<2, 1>, multiply_block<2, 2>}};

inline int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }

void gemm_block_bf16(const uint16_t* a, int64_t lda, const uint16_t* b_packed, float* c, int64_t ldc, int64_t m, int64_t n,
                     int64_t k) {
    int64_t configured_rows = 0, configured_cols = 0;
    for (int64_t j = 0; j < n; j += 2 * kTile)
        for (int64_t i = 0; i < m; i += 2 * kTile) {
            const int64_t rows = at_most(m - i, 2 * kTile), cols = at_most(n - j, 2 * kTile);
            if (rows != configured_rows || cols != configured_cols) configure(rows, cols);
            configured_rows = rows, configured_cols = cols;
            kBlocks[rows > kTile][cols > kTile](
                {rows, cols, a + i * lda, lda, b_packed + 2 * j, 2 * n, c + i * ldc + j, ldc, k});
        }
    if (configured_rows) _tile_release();
}

constexpr Table make_table() {
    Table table{"amx", {OPKIT_TILE_FEATURES "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
                tiles_are_permitted, attention::amx::kRows};
    table.gemm_block_bf16 = gemm_block_bf16;
    table.attention_bf16 = attention::amx::attend;
    table.attention_cells_bf16 = attention::amx::fill_rows;
    table.attention_backward_bf16 = attention::amx::retreat;
    return table;
}

}  // namespace

extern const Table amx;
constexpr Table amx = make_table();

}  // namespace opkit::isa
#endif
