// The kernel of products: tiles of some rows by some panels, whose sums are in registers.
//
// V is an ISA's vectors, and has besides what isa/*_vectors.hpp give
//   kTileRows, kTilePanels   of a tile; kRowPanels: of a tile of one row, which waits for memory and not for sums
//   kTileSteps               of the depth that are computed in one piece: where sums take most registers, fewer keep them there
//   positive(a)              the larger of a and 0; NaN where a is
#pragma once

#include <stddef.h>

#include "../isa/unroll.hpp"
#include "block.hpp"

namespace opkit::product {
namespace {

inline float positive(float a) { return a < 0.0f ? 0.0f : a; }

template <class V, int R, int P>
using Sums = typename V::Floats[R][P * kPanel / V::kLanes];

template <class V, int R, int P>
inline __attribute__((always_inline)) void add_step(Sums<V, R, P>& sum, const float* const (&x)[R], int64_t step, const float* panel,
                                                    int64_t panel_pitch) {
    constexpr int kVectors = static_cast<int>(kPanel) / V::kLanes;
    typename V::Floats right[P * kVectors];
    OPKIT_UNROLL
    for (int j = 0; j < P * kVectors; ++j) right[j] = V::load(panel + j / kVectors * panel_pitch + j % kVectors * V::kLanes);
    OPKIT_UNROLL
    for (int i = 0; i < R; ++i) {
        const typename V::Floats left = V::broadcast(x[i][step]);
        OPKIT_UNROLL
        for (int j = 0; j < P * kVectors; ++j) sum[i][j] = V::fma(left, right[j], sum[i][j]);
    }
}

// What follows the sums of whole panels.
template <class V, int R, int P>
inline __attribute__((always_inline)) void finish(const Block& block, Sums<V, R, P>& sum, int64_t row, int64_t column) {
    constexpr int kVectors = P * static_cast<int>(kPanel) / V::kLanes;
    const auto each = [&](const auto& change) __attribute__((always_inline)) {
        OPKIT_UNROLL
        for (int i = 0; i < R; ++i)
            OPKIT_UNROLL
            for (int j = 0; j < kVectors; ++j) change(sum[i][j], row + i, column + j * V::kLanes);
    };
    using Floats = typename V::Floats;
    if (!block.first) {
        each([&](Floats& a, int64_t i, int64_t j) { a = V::plus(a, V::load(block.y + i * block.y_pitch + j)); });
    } else {
        if (block.bias) each([&](Floats& a, int64_t, int64_t j) { a = V::plus(a, V::load(block.bias + j)); });
        if (block.addend)
            each([&](Floats& a, int64_t i, int64_t j) { a = V::plus(a, V::load(block.addend + i * block.addend_pitch + j)); });
    }
    if (block.last && block.activation == kRelu) each([](Floats& a, int64_t, int64_t) { a = V::positive(a); });
    each([&](Floats& a, int64_t i, int64_t j) { V::store(block.y + i * block.y_pitch + j, a); });
}

// The same for the columns of a panel that is not full.
inline void finish_columns(const Block& block, const float* sums, int64_t row, int64_t column) {
    float* y = block.y + row * block.y_pitch;
    for (; column < block.columns; ++column, ++sums) {
        float sum = *sums;
        if (!block.first) {
            sum += y[column];
        } else {
            if (block.bias) sum += block.bias[column];
            if (block.addend) sum += block.addend[row * block.addend_pitch + column];
        }
        y[column] = block.last && block.activation == kRelu ? positive(sum) : sum;
    }
}

// `next` is of the next panels: a line of them is brought near at every piece, as a tile of many rows takes longer than that.
template <class V, int R, int P>
inline __attribute__((always_inline)) void tile(const Block& block, int64_t row, int64_t column, const float* next) {
    constexpr int kVectors = static_cast<int>(kPanel) / V::kLanes, kSteps = V::kTileSteps;
    Sums<V, R, P> sum;
    OPKIT_UNROLL
    for (int i = 0; i < R; ++i)
        OPKIT_UNROLL
        for (int j = 0; j < P * kVectors; ++j) sum[i][j] = V::zero();
    const int64_t panel_pitch = block.panel_pitch;
    const float* panel = block.panels + column / kPanel * panel_pitch;
    OPKIT_UNROLL
    for (int i = 0; i < R; ++i)
        OPKIT_UNROLL
        for (int j = 0; j < P; ++j) __builtin_prefetch(block.y + (row + i) * block.y_pitch + column + j * kPanel, 0, 2);
    for (int64_t tap = 0; tap < block.taps; ++tap) {
        const float* x[R];
        OPKIT_UNROLL
        for (int i = 0; i < R; ++i)
            x[i] = block.places ? block.places[tap * block.rows + row + i] : block.x + (row + i) * block.x_pitch;
        if (!x[0]) {
            panel += block.depth * kPanel;
            continue;
        }
        int64_t step = 0;
        for (; step + kSteps <= block.depth; step += kSteps, panel += kSteps * kPanel, next += kPanel) {
            __builtin_prefetch(next, 0, 2);
            OPKIT_UNROLL
            for (int n = 0; n < kSteps; ++n) {
                add_step<V, R, P>(sum, x, step + n, panel + n * kPanel, panel_pitch);
                __asm__ volatile("" ::: "memory");  // no load moves to another step: it would take the register of a sum
            }
        }
        for (; step < block.depth; ++step, panel += kPanel) add_step<V, R, P>(sum, x, step, panel, panel_pitch);
    }
    if (block.columns - column >= P * kPanel) {
        finish<V, R, P>(block, sum, row, column);
        return;
    }
    OPKIT_UNROLL
    for (int i = 0; i < R; ++i) {
        float sums[P * kPanel];
        OPKIT_UNROLL
        for (int j = 0; j < P * kVectors; ++j) V::store(sums + j * V::kLanes, sum[i][j]);
        finish_columns(block, sums, row + i, column);
    }
}

template <class V, int P, int R>
__attribute__((noinline)) void one_tile(const Block& block, int64_t row, int64_t column, const float* next) {
    tile<V, R, P>(block, row, column, next);
}

template <class V, int P, int R = V::kTileRows>
inline void tile_of(const Block& block, int64_t row, int64_t rows, int64_t column, const float* next) {
    if (rows == R) return one_tile<V, P, R>(block, row, column, next);
    if constexpr (R > 1) tile_of<V, P, R - 1>(block, row, rows, column, next);
}

// All rows by P panels. The rows of a line are shared out evenly, since tiles of few rows are slower.
template <class V, int P>
void column_of_tiles(const Block& block, int64_t column) {
    const int64_t tiles = (block.line + V::kTileRows - 1) / V::kTileRows, depth = block.taps * block.depth;
    const float* next = block.panels + (column / kPanel + P) * block.panel_pitch;
    for (int64_t n = 0; n < block.rows / block.line * tiles; ++n) {
        const int64_t line = n / tiles * block.line, tile = n % tiles;
        const int64_t row = block.line * tile / tiles, end = block.line * (tile + 1) / tiles;
        const float* quarter = next + n / 4 % P * block.panel_pitch + n % 4 * (depth / 4) * kPanel;
        tile_of<V, P>(block, line + row, end - row, column, quarter);
    }
}

template <class V>
void multiply(const Block& block) {
    constexpr int P = V::kTilePanels, kRow = V::kRowPanels;
    int64_t column = 0;
    if (block.rows == 1)
        for (; block.columns - column >= kRow * kPanel; column += kRow * kPanel)
            one_tile<V, kRow, 1>(block, 0, column, block.panels + (column / kPanel + kRow) * block.panel_pitch);
    for (; block.columns - column > (P - 1) * kPanel; column += P * kPanel) column_of_tiles<V, P>(block, column);
    for (; column < block.columns; column += kPanel) column_of_tiles<V, 1>(block, column);
}

}  // namespace
}  // namespace opkit::product
