// The softmax of a tile of logits, online (Milakov and Gimelshein, 2018): a row keeps its greatest logit and its sum of exps.
#pragma once

#include "block.hpp"
#include "decode_task.hpp"
#include "powers.hpp"

namespace opkit::attention {
namespace {

// One row of a tile.
struct TileRow {
    float* logits;             // whole vectors, which become the exps
    int64_t keys;
    uint64_t visible;          // a bit for each key
    bool scaled;               // the logits are
    float factor, softcap;
    const float *k_scale, *v_scale;  // of each key, to whole vectors; or null
};

template <class V>
typename V::Floats capped(typename V::Floats x, float softcap) {
    return V::times(hyperbolic_tangent<V>(V::times(x, V::broadcast(1.0f / softcap))), V::broadcast(softcap));
}

template <class V>
typename V::Floats scaled_logits(const TileRow& row, int64_t j) {
    auto x = V::times(V::load(row.logits + j), V::broadcast(row.factor));
    if (row.k_scale) x = V::times(x, V::load(row.k_scale + j));
    return row.softcap > 0 ? capped<V>(x, row.softcap) : x;
}

template <class V>
void scale_logits(const TileRow& row) {
    for (int64_t j = 0; j < row.keys; j += V::kLanes) V::store(row.logits + j, scaled_logits<V>(row, j));
}

// Writes the final logits; -inf for hidden keys, whatever their product is. Gives the greatest.
template <class V>
float finish_logits(const TileRow& row) {
    const auto hidden = V::broadcast(-__builtin_inff());
    auto most = hidden;
    for (int64_t j = 0; j < row.keys; j += V::kLanes) {
        auto x = row.scaled ? V::load(row.logits + j) : scaled_logits<V>(row, j);
        if (row.visible != ~uint64_t{0}) x = V::where(V::bits(row.visible, static_cast<int>(j / V::kLanes)), x, hidden);
        V::store(row.logits + j, x);
        most = V::greatest(x, most);
    }
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
        const auto exps = exponential<V, 6, true>(V::plus(V::load(row.logits + j), V::broadcast(-base)));
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
