// How attention multiplies float32. V has what forward.hpp needs.
#pragma once

#include "../isa/vector_products.hpp"
#include "block.hpp"

namespace opkit::attention {
namespace {

// Probabilities stay float32.
template <class Vectors>
struct FloatWeights {
    template <int N>
    static void store_weights(float* cells, const typename Vectors::Floats (&powers)[N]) {
        OPKIT_UNROLL
        for (int j = 0; j < N; ++j) Vectors::store(cells + j * Vectors::kLanes, powers[j]);
    }
    static float weight(const float* cells, int64_t key) { return cells[key]; }
    // The first `columns` floats of rows of kKeys, whole vectors, to columns of cells.
    static void transpose_rows(const float* rows, int64_t count, int64_t columns, float* cells, int64_t pitch) {
        Vectors::transposed(reinterpret_cast<const uint32_t*>(rows), kKeys, count, columns, reinterpret_cast<uint32_t*>(cells), pitch);
    }
};

template <class Vectors>
struct FloatProduct : isa::ProductF32<Vectors>, FloatWeights<Vectors> {
    static constexpr int kDegree = 6;
    static float value(uint32_t word, int64_t) { return isa::float_of(word); }
};

inline float half_of(uint32_t word, int64_t key) { return isa::float_of(key % 2 ? word & 0xFFFF0000u : word << 16); }

}  // namespace
}  // namespace opkit::attention
