// Exponentials for any ISA: e^x = 2^n 2^f with n the integer nearest to x / ln 2, and 2^f on [-1/2, 1/2] by the polynomial of least
// relative error (Remez) that is exact at 0: 1.9e-9 for the sixth degree, 2.8e-6 for the fourth, which probabilities in bf16 can use.
#pragma once

#include "block.hpp"

namespace opkit::attention {
namespace {

template <class V, int DEGREE, bool WEIGHT>
inline __attribute__((always_inline)) typename V::Floats polynomial(typename V::Floats f) {
    constexpr float kSixth[] = {1.0f, 0.6931471824645996f, 0.24022646248340607f, 0.05550328642129898f, 0.009618489071726799f,
                                0.0013399930903688073f, 0.0001534581242594868f};
    constexpr float kFourth[] = {1.0f, 0.6931241750717163f, 0.24024099111557007f, 0.055906426161527634f, 0.009582853876054287f};
    static_assert(DEGREE == 6 || DEGREE == 4);
    const float* c = DEGREE == 6 ? kSixth : kFourth;
    constexpr float kTimes = WEIGHT ? kWeight : 1.0f;
    auto sum = V::broadcast(c[DEGREE] * kTimes);
    for (int i = DEGREE - 1; i >= 0; --i) sum = V::fma(sum, f, V::broadcast(c[i] * kTimes));
    return sum;
}

// e^x, for x <= 88, or that times kWeight. e^-inf is 0, NaN stays; results below the smallest normal number may be 0.
template <class V, int DEGREE, bool WEIGHT = false>
inline __attribute__((always_inline)) typename V::Floats exponential(typename V::Floats x) {
    const auto bounded = V::greatest(V::broadcast(V::kLeastPower), x);  // what is less gives 0 too; -inf less itself would be NaN
    const auto log2_e = V::broadcast(1.4426950408889634f), scaled = V::times(bounded, log2_e), n = V::nearest(scaled);
    return V::scaled(polynomial<V, DEGREE, WEIGHT>(V::fused_minus(bounded, log2_e, n)), n, scaled);
}

template <class V, int DEGREE>
float exponential_of(float x) {
    float lanes[V::kLanes];
    V::store(lanes, exponential<V, DEGREE>(V::broadcast(x)));
    return lanes[0];
}

// tanh x = e / (e + 2) with e = exp(2 x) - 1, which is taken without cancellation.
template <class V>
inline __attribute__((always_inline)) typename V::Floats hyperbolic_tangent(typename V::Floats x) {
    const auto bounded = V::least(V::broadcast(10.0f), V::greatest(V::broadcast(-10.0f), x));
    const auto twice = V::broadcast(2.8853900817779268f);  // 2 / ln 2
    const auto n = V::nearest(V::times(bounded, twice)), f = V::fused_minus(bounded, twice, n);
    const auto power = V::scaled(V::broadcast(1.0f), n, n);
    constexpr float c[] = {0.6931471824645996f, 0.24022646248340607f, 0.05550328642129898f, 0.009618489071726799f,
                           0.0013399930903688073f, 0.0001534581242594868f};
    auto sum = V::broadcast(c[5]);
    for (int i = 4; i >= 0; --i) sum = V::fma(sum, f, V::broadcast(c[i]));
    const auto e = V::fma(V::times(sum, f), power, V::minus(power, V::broadcast(1.0f)));
    return V::over(e, V::plus(e, V::broadcast(2.0f)));
}

}  // namespace
}  // namespace opkit::attention
