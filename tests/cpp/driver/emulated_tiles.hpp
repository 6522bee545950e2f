// The tiles of AMX in memory, for processors that have none: what the kernels do is checked, not how fast. Included before all else.
#pragma once
#define OPKIT_EMULATED_TILES

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <stdint.h>

namespace {

struct EmulatedTiles {
    static constexpr int kRows = 16, kWords = 16;
    uint32_t words[8][kRows][kWords];
    uint16_t row_bytes[8];
    uint8_t rows[8];

    static EmulatedTiles& here() {
        static thread_local EmulatedTiles tiles;
        return tiles;
    }
    void configure(const void* at) {
        const auto* bytes = static_cast<const uint8_t*>(at);
        __builtin_memcpy(row_bytes, bytes + 16, sizeof row_bytes);
        __builtin_memcpy(rows, bytes + 48, sizeof rows);
    }
    void zero(int tile) { __builtin_memset(words[tile], 0, sizeof words[tile]); }
    void load(int tile, const void* from, int64_t pitch) {
        zero(tile);
        for (int r = 0; r < rows[tile]; ++r)
            __builtin_memcpy(words[tile][r], static_cast<const char*>(from) + r * pitch, row_bytes[tile]);
    }
    void store(int tile, void* to, int64_t pitch) const {
        for (int r = 0; r < rows[tile]; ++r)
            __builtin_memcpy(static_cast<char*>(to) + r * pitch, words[tile][r], row_bytes[tile]);
    }
    static float as_float(uint32_t bits) {
        float value;
        __builtin_memcpy(&value, &bits, 4);
        return value;
    }
    // TDPBF16PS: even and odd elements of pairs one after the other, and subnormal numbers are zero.
    static float number(uint32_t bits) { return (bits & 0x7F800000u) ? as_float(bits) : 0.0f; }
    void multiply(int c, int a, int b) {
        for (int m = 0; m < rows[c]; ++m)
            for (int n = 0; n < row_bytes[c] / 4; ++n) {
                float sum = number(words[c][m][n]);
                for (int k = 0; k < row_bytes[a] / 4; ++k) {
                    sum += number(words[a][m][k] << 16) * number(words[b][k][n] << 16);
                    sum += number(words[a][m][k] & 0xFFFF0000u) * number(words[b][k][n] & 0xFFFF0000u);
                }
                __builtin_memcpy(&words[c][m][n], &sum, 4);
            }
    }
};

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(at) EmulatedTiles::here().configure(at)
#define _tile_release() (void)0
#define _tile_zero(tile) EmulatedTiles::here().zero(tile)
#define _tile_loadd(tile, at, pitch) EmulatedTiles::here().load(tile, at, pitch)
#define _tile_stored(tile, at, pitch) EmulatedTiles::here().store(tile, at, pitch)
#define _tile_dpbf16ps(c, a, b) EmulatedTiles::here().multiply(c, a, b)
#endif
