// Conversions and packing for any ISA with vectors: V is the ISA's struct of vector operations (avx2.cpp is the model).
#pragma once

#include "scalar.hpp"

namespace opkit::isa {
namespace {

template <class V>
void widen(const uint16_t* in, float* out, int64_t n) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) V::widen(in + i, out + i);
    for (; i < n; ++i) out[i] = widen_one(in[i]);
}

template <class V>
void narrow(const float* in, uint16_t* out, int64_t n) {
    int64_t i = 0;
    for (; i + V::kLanes <= n; i += V::kLanes) V::narrow(in + i, out + i);
    for (; i < n; ++i) out[i] = narrow_one(in[i]);
}

template <class V>
void pack_pairs(const uint16_t* b, int64_t ldb, uint16_t* packed, int64_t n, int64_t k) {
    for (int64_t p = 0; p + 1 < k; p += 2, b += 2 * ldb, packed += 2 * n) {
        int64_t j = 0;
        for (; j + V::kLanes <= n; j += V::kLanes) V::interleave(b + j, b + ldb + j, packed + 2 * j);
        pair_rows(b + j, b + ldb + j, packed + 2 * j, n - j);
    }
    if (k % 2) pair_rows(b, nullptr, packed, n);
}

}  // namespace
}  // namespace opkit::isa
