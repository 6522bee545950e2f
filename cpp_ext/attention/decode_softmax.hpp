// The softmax of a tile of logits, online (Milakov and Gimelshein, 2018): a row keeps its greatest logit and its sum of exps.
#pragma once

#include "block.hpp"
#include "decode_task.hpp"
#include "powers.hpp"

namespace opkit::attention {
namespace {

// One row of a tile. Keys [first, last) of the tile's `keys` are visible.
struct TileRow {
    float* logits;             // whole vectors, which become the exps
    int64_t first, last, keys;
    float factor, softcap;
    const float *k_scale, *v_scale;  // of each key, to whole vectors; or null
};

template <class V>
typename V::Floats capped(typename V::Floats x, float softcap) {
    return V::times(hyperbolic_tangent<V>(V::times(x, V::broadcast(1.0f / softcap))), V::broadcast(softcap));
}

// Writes the final logits; -inf for hidden keys, whatever their product is. Gives the greatest.
template <class V>
float finish_logits(const TileRow& row) {
    const float hidden = -__builtin_inff();
    for (int64_t j = 0; j < row.keys; j += V::kLanes) {
        auto x = V::times(V::load(row.logits + j), V::broadcast(row.factor));
        if (row.k_scale) x = V::times(x, V::load(row.k_scale + j));
        if (row.softcap > 0) x = capped<V>(x, row.softcap);
        V::store(row.logits + j, x);
    }
    for (int64_t j = 0; j < row.first; ++j) row.logits[j] = hidden;
    for (int64_t j = row.last; j < rounded_up(row.keys, V::kLanes); ++j) row.logits[j] = hidden;
    auto most = V::broadcast(hidden);
    for (int64_t j = 0; j < row.keys; j += V::kLanes) most = V::greatest(V::load(row.logits + j), most);
    return V::greatest_lane(most);
}

// Updates the row's maximum and total, writes the weights of P, and gives what the row's sums so far are to be times.
template <class P>
float update(const TileRow& row, float& maximum, float& total, typename P::Weight* weights) {
    using V = typename P::V;
    const float found = finish_logits<V>(row);
    const float greatest = found > maximum ? found : maximum;
    const float base = greatest == -__builtin_inff() ? 0.0f : greatest;  // a row that sees nothing yet: exps of -inf, 0
    const float decay = exponential_of<V, 6>(maximum - base);
    auto sum = V::zero();
    for (int64_t j = 0; j < row.keys; j += V::kLanes) {
        const auto exps = exponential<V, 6>(V::plus(V::load(row.logits + j), V::broadcast(-base)));
        sum = V::plus(sum, exps);
        V::store(row.logits + j, row.v_scale ? V::times(exps, V::load(row.v_scale + j)) : exps);
        P::weigh(row.logits + j, weights + j);
    }
    total = total * decay + V::sum_of_lanes(sum);
    maximum = greatest;
    return decay;
}

}  // namespace
}  // namespace opkit::attention
