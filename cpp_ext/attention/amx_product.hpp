// Products of bf16 by AMX: two by two tiles of sums at a time.
//
// 32 k of them are four loads of a kilobyte, 8 cycles each, and four TDPBF16PS, which a core begins every 16 cycles (1,024 FLOPs a
// cycle). Tiles are whole: rows and k are padded with zeros to multiples of 16 and 32, columns to multiples of 16.
#pragma once

#include "../isa/amx_tiles.hpp"
#include "block.hpp"

namespace opkit::attention {
namespace {

// The factors of c[rows][columns] (+)= a[rows][k] b[k][columns]: a by rows, b as pairs of k, 32 bits each. Distances are in bytes.
struct Left {
    const void* at;
    int64_t pitch;
    int64_t depth;   // tiles of k
};

struct Right {
    const void* at;
    int64_t pitch;
};

struct Sums {
    float* at;
    int64_t pitch, columns;
    bool tall, adds;  // 32 rows, not 16; there are sums
};

struct Corner {  // of two by two tiles of sums
    char* at;
    int64_t pitch;
    bool tall, wide;
    char* right() const { return at + 64; }
    char* below() const { return at + isa::kTile * pitch; }
    char* last() const { return below() + 64; }
};

inline void load_sums(const Corner& c) {
    _tile_loadd(0, c.at, c.pitch);
    if (c.wide) _tile_loadd(1, c.right(), c.pitch);
    if (c.tall) _tile_loadd(2, c.below(), c.pitch);
    if (c.tall && c.wide) _tile_loadd(3, c.last(), c.pitch);
}

inline void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

inline void store_sums(const Corner& c) {
    _tile_stored(0, c.at, c.pitch);
    if (c.wide) _tile_stored(1, c.right(), c.pitch);
    if (c.tall) _tile_stored(2, c.below(), c.pitch);
    if (c.tall && c.wide) _tile_stored(3, c.last(), c.pitch);
}

inline void add_step(const char* a, int64_t a_pitch, const char* b, int64_t b_pitch, bool tall, bool wide) {
    _tile_loadd(6, b, b_pitch);
    _tile_loadd(4, a, a_pitch);
    _tile_dpbf16ps(0, 4, 6);
    if (wide) {
        _tile_loadd(7, b + 64, b_pitch);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (tall) {
        _tile_loadd(5, a + isa::kTile * a_pitch, a_pitch);
        _tile_dpbf16ps(2, 5, 6);
        if (wide) _tile_dpbf16ps(3, 5, 7);
    }
}

inline void multiply(const Left& a, const Right& b, const Sums& c) {
    isa::stores_are_done();
    for (int64_t column = 0; column < c.columns; column += 2 * isa::kTile) {
        const Corner corner{reinterpret_cast<char*>(c.at + column), c.pitch, c.tall, c.columns - column > isa::kTile};
        if (c.adds)
            load_sums(corner);
        else
            zero_sums();
        const auto* left = static_cast<const char*>(a.at);
        const char* right = static_cast<const char*>(b.at) + 4 * column;
        for (int64_t step = 0; step < a.depth; ++step)
            add_step(left + 64 * step, a.pitch, right + isa::kTile * step * b.pitch, b.pitch, c.tall, corner.wide);
        store_sums(corner);
    }
    isa::stores_are_done();
}

}  // namespace
}  // namespace opkit::attention
