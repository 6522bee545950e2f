// How a step of a product is computed with an ISA's vectors. A product sums a[m][k] b[k][n] over k; a step is one row of b as
// stored: one k for float32, a pair of k for bf16. Its entries are words of 32 bits either way.
// A product P has:
//   V                    the vectors
//   Input                the element of a and b
//   Cell, kPerCell       the element to which rows of a are converted, and how many k it holds
//   kPhases              passes over b's words in one step; each takes the next cell of a's row
//   fill(cells, a, k)    converts one row of a, padded with zeros to a whole step
//   right<PHASE>(words)  what the words of b give in a pass
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
    static constexpr int kPhases = 1, kPerCell = 1;
    static void fill(float* cells, const float* a, int64_t k) { __builtin_memcpy(cells, a, static_cast<size_t>(k) * 4); }
    template <int>
    static Right right(typename V::Words words) { return V::floats(words); }
    static typename V::Floats left(float cell) { return V::broadcast(cell); }
    static typename V::Floats add(typename V::Floats sum, typename V::Floats left, Right right) {
        return V::fma(left, right, sum);
    }
};

// bf16 without instructions for it: a is widened in its cells, b in registers (a shift for the even k, a mask for the odd).
template <class Vectors>
struct ProductBf16 : ProductF32<Vectors> {
    using V = Vectors;
    using Input = uint16_t;
    using typename ProductF32<Vectors>::Right;
    static constexpr int kPhases = 2;
    static void fill(float* cells, const uint16_t* a, int64_t k) {
        widen<V>(a, cells, k);
        if (k % 2) cells[k] = 0.0f;
    }
    template <int PHASE>
    static Right right(typename V::Words words) {
        if constexpr (PHASE == 0) return V::even(words);
        return V::odd(words);
    }
};

}  // namespace
}  // namespace opkit::isa
