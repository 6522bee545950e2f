// Attention backward by AMX: what backward.hpp says, with the five products by tiles of 32 rows.
//
// Per row and tile of 64 keys: 640 * head FLOPs, that is 40 cycles of the matrix unit at a head of 64; two vectors of scores and of
// gradients at a time for probabilities and differences, and two transpositions of rows, about 60 cycles of the vector ports. What
// limits it is the latter at a head of 64, both at 128.
#pragma once

#include "amx_product.hpp"
#include "backward.hpp"
#include "pairs_avx512.hpp"

namespace opkit::attention::amx {
namespace {

constexpr int64_t kGroup = 32;  // rows

// Rows as the left side of products: padded with zeros to whole tiles.
void fill_rows(const void* rows, int64_t pitch, int64_t count, int64_t elements, void* out) {
    const auto* from = static_cast<const uint16_t*>(rows);
    auto* to = static_cast<uint16_t*>(out);
    const int64_t padded = rounded_up(elements, isa::kTileK);
    __builtin_memset(to, 0, static_cast<size_t>(2 * rounded_up(count, kGroup) * padded));
    for (int64_t i = 0; i < count; ++i) __builtin_memcpy(to + i * padded, from + i * pitch, static_cast<size_t>(2 * elements));
}

// c[32][columns] (+)= a words, whose rows lie as those of c do.
void product(const Left& a, const uint32_t* words, float* c, int64_t columns, bool adds) {
    multiply(a, {words, 4 * columns}, {c, 4 * columns, columns, true, adds});
}

Left rows_of(const void* cells, int64_t first, int64_t elements) {
    const int64_t padded = rounded_up(elements, isa::kTileK);
    return {static_cast<const uint16_t*>(cells) + first * padded, 2 * padded, padded / isa::kTileK};
}

// c[kKeys][columns] += rows^T words, of what `count` rows of kKeys hold, which is lost.
void add_turned(float* rows, int64_t count, uint32_t* cells, const uint32_t* words, float* sums, int64_t columns) {
    const int64_t padded = rounded_up(count, isa::kTileK), pitch = padded / 2;
    PairProduct::transpose_rows(rows, padded, kKeys, cells, pitch);
    for (int64_t key = 0; key < kKeys; key += kGroup)
        product({cells + key * pitch, 4 * pitch, padded / isa::kTileK}, words, sums + key * columns, columns, true);
}

void attend_backward(const BackwardTile& tile) {
    const isa::WholeTiles tiles;
    auto* scores = static_cast<float*>(tile.memory);
    float* slopes = scores + kBackwardRows * kKeys;
    auto* cells = reinterpret_cast<uint32_t*>(slopes + kBackwardRows * kKeys);
    for (int64_t i = 0; i < tile.rows; i += kGroup) {
        product(rows_of(tile.queries, i, tile.head), tile.keys, scores + i * kKeys, kKeys, false);
        product(rows_of(tile.gradients, i, tile.value), tile.values, slopes + i * kKeys, kKeys, false);
        differentiate_rows<PairProduct>(tile, i, kGroup, Span(), scores + i * kKeys, slopes + i * kKeys);
        if (!tile.query_sums) continue;
        for (int64_t row = i; row < i + kGroup; ++row) keep_row<PairProduct>(slopes + row * kKeys, cells + (row - i) * (kKeys / 2));
        product({cells, 2 * kKeys, kKeys / isa::kTileK}, tile.key_words, tile.query_sums + i * tile.columns, tile.columns, true);
    }
    if (!tile.query_sums) return;
    add_turned(scores, tile.rows, cells, tile.gradient_words, tile.value_sums, tile.value_columns);
    add_turned(slopes, tile.rows, cells, tile.query_words, tile.key_sums, tile.columns);
}

}  // namespace
}  // namespace opkit::attention::amx
