// c += a b for any ISA with vectors. A tile of c, ROWS by COLS vectors, stays in registers for a stretch of k; the rows of a
// lie in a small panel on the stack, so that the address of every broadcast is one register and a constant.
//
// A step is one row of b as stored: one k for float32, a pair of k for bf16. Its entries are words of 32 bits either way.
// A product P says how a step is computed:
//   V, kRows, kCols      the vectors, and the largest tile
//   Input                the element of a and b
//   Cell, kPerCell       the element of the panel, and how many k it holds
//   kPhases              passes over b's words in one step; each takes the next cell of the panel
//   fill(panel, a, k)    writes one row of the panel, padded with zeros to a whole step
//   right<PHASE>(words)  what the words of b give in a pass
//   add(sum, left, right), left(cell)
#pragma once

#include <stddef.h>

#include "unroll.hpp"
#include "vector_convert.hpp"

namespace opkit::isa {
namespace {

constexpr int64_t kDepth = 256;           // cells in a row of the panel
constexpr int64_t kPitch = kDepth + 16;   // no power of two, so that rows fall into different sets of the cache

// A vector's worth of words from memory: the last vector of a tile may be partial, and reads nothing beyond its lanes.
template <class V, bool PART>
typename V::Words words(const unsigned char* at, typename V::Mask last, bool is_last) {
    if (PART && is_last) return V::words(at, last);
    return V::words(at);
}

template <class P, int PHASE, int ROWS, int COLS, bool PART>
inline __attribute__((always_inline)) void pass(typename P::V::Floats (&sum)[ROWS][COLS], const typename P::Cell* panel,
                                                const unsigned char* b, typename P::V::Mask last) {
    using V = typename P::V;
    typename P::Right right[COLS];
    OPKIT_UNROLL
    for (int j = 0; j < COLS; ++j)
        right[j] = P::template right<PHASE>(words<V, PART>(b + j * V::kLanes * 4, last, j == COLS - 1));
    OPKIT_UNROLL
    for (int i = 0; i < ROWS; ++i) {
        const auto left = P::left(panel[i * kPitch + PHASE]);
        OPKIT_UNROLL
        for (int j = 0; j < COLS; ++j) sum[i][j] = P::add(sum[i][j], left, right[j]);
    }
}

template <class V, bool PART>
inline __attribute__((always_inline)) void accumulate(float* c, typename V::Floats sum, typename V::Mask last, bool is_last) {
    if (PART && is_last)
        V::store(c, V::plus(V::load(c, last), sum), last);
    else
        V::store(c, V::plus(V::load(c), sum));
}

template <class P, int ROWS, int COLS, bool PART>
void tile(const typename P::Cell* panel, const unsigned char* b, int64_t pitch, float* c, int64_t ldc, int64_t steps,
          typename P::V::Mask last) {
    using V = typename P::V;
    typename V::Floats sum[ROWS][COLS];
    OPKIT_UNROLL
    for (int i = 0; i < ROWS; ++i)
        OPKIT_UNROLL
        for (int j = 0; j < COLS; ++j) sum[i][j] = V::zero();
    for (int64_t step = 0; step < steps; ++step, panel += P::kPhases, b += pitch) {
        pass<P, 0, ROWS, COLS, PART>(sum, panel, b, last);
        if constexpr (P::kPhases == 2) pass<P, 1, ROWS, COLS, PART>(sum, panel, b, last);
    }
    OPKIT_UNROLL
    for (int i = 0; i < ROWS; ++i, c += ldc)
        OPKIT_UNROLL
        for (int j = 0; j < COLS; ++j) accumulate<V, PART>(c + j * V::kLanes, sum[i][j], last, j == COLS - 1);
}

// The tiles of every height: all columns whole, or 1 to kCols vectors of columns of which the last is partial.
template <class P>
struct Tiles {
    using Tile = void (*)(const typename P::Cell*, const unsigned char*, int64_t, float*, int64_t, int64_t,
                          typename P::V::Mask);
    Tile whole[P::kRows + 1] = {};
    Tile part[P::kCols + 1][P::kRows + 1] = {};
};

template <class P, int ROWS, int COLS>
constexpr void list_parts(Tiles<P>& tiles) {
    tiles.part[COLS][ROWS] = tile<P, ROWS, COLS, true>;
    if constexpr (COLS > 1) list_parts<P, ROWS, COLS - 1>(tiles);
}

template <class P, int ROWS = P::kRows>
constexpr void list_tiles(Tiles<P>& tiles) {
    tiles.whole[ROWS] = tile<P, ROWS, P::kCols, false>;
    list_parts<P, ROWS, P::kCols>(tiles);
    if constexpr (ROWS > 1) list_tiles<P, ROWS - 1>(tiles);
}

template <class P>
constexpr Tiles<P> all_tiles() {
    Tiles<P> tiles;
    list_tiles<P>(tiles);
    return tiles;
}

template <class P>
constexpr Tiles<P> kTiles = all_tiles<P>();

// The rows of the panel times all columns of b.
template <class P>
void band(const typename P::Cell* panel, const unsigned char* b, int64_t pitch, float* c, int64_t ldc, int64_t rows, int64_t n,
          int64_t steps) {
    using V = typename P::V;
    constexpr int64_t kWidth = P::kCols * V::kLanes;
    int64_t j = 0;
    for (; j + kWidth <= n; j += kWidth) kTiles<P>.whole[rows](panel, b + 4 * j, pitch, c + j, ldc, steps, V::mask(0));
    if (j == n) return;
    const int64_t vectors = (n - j + V::kLanes - 1) / V::kLanes;
    const auto last = V::mask(n - j - (vectors - 1) * V::kLanes);
    kTiles<P>.part[vectors][rows](panel, b + 4 * j, pitch, c + j, ldc, steps, last);
}

// ldb is the distance of b's steps in words. The rows are dealt out evenly: 64 rows in tiles of at most 14 are four of 13
// and one of 12.
template <class P>
void gemm(const typename P::Input* a, int64_t lda, const typename P::Input* b, int64_t ldb, float* c, int64_t ldc, int64_t m,
          int64_t n, int64_t k) {
    constexpr int64_t kStep = P::kPhases * P::kPerCell;
    const auto* bytes = reinterpret_cast<const unsigned char*>(b);
    const int64_t bands = (m + P::kRows - 1) / P::kRows;
    alignas(64) typename P::Cell panel[P::kRows * kPitch];
    for (int64_t k0 = 0; k0 < k; k0 += kDepth * P::kPerCell, bytes += 4 * ldb * (kDepth / P::kPhases)) {
        const int64_t depth = k - k0 < kDepth * P::kPerCell ? k - k0 : kDepth * P::kPerCell;
        for (int64_t i = 0, left = bands; left > 0; --left) {
            const int64_t rows = (m - i + left - 1) / left;
            for (int64_t r = 0; r < rows; ++r) P::fill(panel + r * kPitch, a + (i + r) * lda + k0, depth);
            band<P>(panel, bytes, 4 * ldb, c + i * ldc, ldc, rows, n, (depth + kStep - 1) / kStep);
            i += rows;
        }
    }
}

template <class Vectors>
struct ProductF32 {
    using V = Vectors;
    using Input = float;
    using Cell = float;
    using Right = typename V::Floats;
    static constexpr int kRows = V::kRows, kCols = V::kCols, kPhases = 1, kPerCell = 1;
    static void fill(float* panel, const float* a, int64_t k) { __builtin_memcpy(panel, a, static_cast<size_t>(k) * 4); }
    template <int>
    static Right right(typename V::Words words) { return V::floats(words); }
    static typename V::Floats left(float cell) { return V::broadcast(cell); }
    static typename V::Floats add(typename V::Floats sum, typename V::Floats left, Right right) {
        return V::fma(left, right, sum);
    }
};

// bf16 without instructions for it: a is widened in the panel, b in registers (a shift for the even k, a mask for the odd).
template <class Vectors>
struct ProductBf16 : ProductF32<Vectors> {
    using V = Vectors;
    using Input = uint16_t;
    using typename ProductF32<Vectors>::Right;
    static constexpr int kRows = V::kPairRows, kPhases = 2;
    static void fill(float* panel, const uint16_t* a, int64_t k) {
        widen<V>(a, panel, k);
        if (k % 2) panel[k] = 0.0f;
    }
    template <int PHASE>
    static Right right(typename V::Words words) {
        if constexpr (PHASE == 0) return V::even(words);
        return V::odd(words);
    }
};

template <class V>
void gemm_f32(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t m, int64_t n,
              int64_t k) {
    gemm<ProductF32<V>>(a, lda, b, ldb, c, ldc, m, n, k);
}

template <class P>
void gemm_pairs(const uint16_t* a, int64_t lda, const uint16_t* b_packed, float* c, int64_t ldc, int64_t m, int64_t n,
                int64_t k) {
    gemm<P>(a, lda, b_packed, n, c, ldc, m, n, k);
}

}  // namespace
}  // namespace opkit::isa
