// How a step of a product is computed with an ISA's vectors. A product sums a[m][k] b[k][n] over k; a step is one row of b as
// stored: one k for float32, a pair of k for bf16. Its entries are words of 32 bits either way.
// A product P has:
//   V                    the vectors
//   Input                the element of a and b
//   Cell, kPerCell       the element to which rows of a are converted, and how many k it holds
//   fill(cells, a, k)    converts one row of a, padded with zeros to a whole step
//   right(words)         what the words of b give
//   add(sum, left, right), left(cell)
#pragma once

#include <stddef.h>

#include "unroll.hpp"
#include "vector_convert.hpp"

namespace opkit::isa {
namespace {

template <class Vectors>
struct ProductF32 {
    using V = Vectors;
    using Input = float;
    using Cell = float;
    using Right = typename V::Floats;
    static constexpr int kPerCell = 1;
    static void fill(float* cells, const float* a, int64_t k) { __builtin_memcpy(cells, a, static_cast<size_t>(k) * 4); }
    static Right right(typename V::Words words) { return V::floats(words); }
    static typename V::Floats left(float cell) { return V::broadcast(cell); }
    static typename V::Floats add(typename V::Floats sum, typename V::Floats left, Right right) {
        return V::fma(left, right, sum);
    }
};

}  // namespace
}  // namespace opkit::isa
