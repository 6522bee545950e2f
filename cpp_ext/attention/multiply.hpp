// The product that all of attention is made of: R rows of cells by a tile of words, into registers.
//
// P says how a product is computed: Input, Cell, Right, kPerCell, fill, left, right and add as in isa/vector_products.hpp, and
//   V                vectors with what softmax needs (vectors_*.hpp)
//   kDegree          of the polynomial of an exponential
//   store_weights(cells, a)   writes vectors of a row of probabilities to cells
//   weight(cells, n), value(word, n)   number n there, as a float
#pragma once

#include "../isa/vector_products.hpp"
#include "block.hpp"

namespace opkit::attention {
namespace {

// c[R][COLS vectors] = a[R][steps] b[steps][COLS vectors]; each row of a begins `a_pitch` cells after the one before.
template <class P, int R, int COLS>
inline __attribute__((always_inline)) void multiply(typename P::V::Floats (&sum)[R][COLS], const typename P::Cell* a,
                                                    int64_t a_pitch, const uint32_t* b, int64_t b_pitch, int64_t steps) {
    using V = typename P::V;
    OPKIT_UNROLL
    for (int i = 0; i < R; ++i)
        OPKIT_UNROLL
        for (int j = 0; j < COLS; ++j) sum[i][j] = V::zero();
    for (int64_t step = 0; step < steps; ++step, ++a, b += b_pitch) {
        typename P::Right right[COLS];
        OPKIT_UNROLL
        for (int j = 0; j < COLS; ++j) right[j] = P::right(V::words(b + j * V::kLanes));
        OPKIT_UNROLL
        for (int i = 0; i < R; ++i) {
            const auto left = P::left(a[i * a_pitch]);
            OPKIT_UNROLL
            for (int j = 0; j < COLS; ++j) sum[i][j] = P::add(sum[i][j], left, right[j]);
        }
    }
}

// Elements that are summed one after another. Longer sums are sums of such: the error of rounding grows with their number.
constexpr int64_t kStretch = 128;

template <bool VALUE>
struct First {
    static constexpr bool value = VALUE;
};

// Calls part(cells, words, steps, whether it is the first) for stretches of a product.
template <class P, class F>
inline __attribute__((always_inline)) void in_stretches(const typename P::Cell* a, const uint32_t* b, int64_t b_pitch, int64_t steps,
                                                        const F& part) {
    constexpr int64_t kSteps = kStretch / P::kPerCell;
    part(a, b, steps < kSteps ? steps : kSteps, First<true>());
    for (int64_t at = kSteps; at < steps; at += kSteps)
        part(a + at, b + at * b_pitch, steps - at < kSteps ? steps - at : kSteps, First<false>());
}

// The keys of a tile of which some rows see something, from the first to the last.
struct Span {
    int64_t first = 0, last = kKeys;
    bool whole = true;  // whether each row sees all of the tile
    bool empty() const { return first == last; }
    Span widened(int64_t to) const { return {first / to * to, rounded_up(last, to), whole}; }
};

inline Span span_of(const uint64_t* visible, int64_t rows) {
    uint64_t any = 0, all = ~uint64_t{0};
    for (int64_t i = 0; i < rows; ++i) {
        any |= visible[i];
        all &= visible[i];
    }
    if (any == 0) return {0, 0, false};
    return {__builtin_ctzll(any), kKeys - __builtin_clzll(any), all == ~uint64_t{0}};
}

// Cells of a row.
template <class P>
constexpr int64_t cells_of(int64_t elements) {
    return rounded_up(elements, P::kPerCell) / P::kPerCell;
}

// Rows to cells; so many more that they fill the last group are zero.
template <class P>
void fill_cells(const void* rows, int64_t pitch, int64_t count, int64_t elements, void* out) {
    auto* cells = static_cast<typename P::Cell*>(out);
    const int64_t of_row = cells_of<P>(elements);
    for (int64_t i = 0; i < rounded_up(count, P::V::kGroup); ++i, cells += of_row) {
        if (i < count)
            P::fill(cells, static_cast<const typename P::Input*>(rows) + i * pitch, elements);
        else
            __builtin_memset(cells, 0, static_cast<size_t>(of_row) * sizeof *cells);
    }
}

}  // namespace
}  // namespace opkit::attention
