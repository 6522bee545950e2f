// Tiles of AMX: eight registers of up to 16 rows of 64 bytes. A product has its sums in tiles 0 to 3 (2 x 2), rows of a in 4 and 5,
// columns of b in 6 and 7.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace opkit::isa {
namespace {

constexpr int64_t kTile = 16;       // rows of a tile, and words in a row
constexpr int64_t kTileK = 32;      // k in a tile of a (columns) or of b (pairs of rows)

// Linux gives tile data to a process that asks for it. Afterwards an alternate signal stack must have room for it.
inline bool tiles_are_permitted() {
#if defined(OPKIT_EMULATED_TILES)
    return true;
#elif defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

// Compilers do not know that loads of tiles and of the configuration read memory, nor that a store of a tile writes it.
inline void stores_are_done() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int64_t tile, int64_t tile_rows, int64_t words) {
        rows[tile] = static_cast<uint8_t>(tile_rows > kTile ? kTile : tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(4 * (words > kTile ? kTile : words));
    }
    void load() const {
        stores_are_done();
        _tile_loadconfig(this);
    }
};

// All tiles whole, as long as this lives.
struct WholeTiles {
    WholeTiles() {
        Configuration tiles;
        for (int64_t tile = 0; tile < 8; ++tile) tiles.set(tile, kTile, kTile);
        tiles.load();
    }
    WholeTiles(const WholeTiles&) = delete;
    ~WholeTiles() { _tile_release(); }
};

}  // namespace
}  // namespace opkit::isa
