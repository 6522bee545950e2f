// e^x and tanh(x) of vectors of float32, for any ISA. V is the ISA's struct of vector operations; these need of it
// broadcast, plus, times, over, fma, least, greatest, nearest, scaled and where_below.
//
// exponential: at most 1.5 ulp off where the result is normal; e^-inf = 0, e^inf = inf, NaN stays NaN. Beneath -105 all is 0.
// tangent: at most 3 ulp off; NaN stays NaN. The polynomials are those of Cephes (Moshier, 1992).
#pragma once

namespace opkit::isa {
namespace {

template <class V>
inline __attribute__((always_inline)) typename V::Floats polynomial(typename V::Floats, typename V::Floats sum) {
    return sum;
}

template <class V, class... More>
inline __attribute__((always_inline)) typename V::Floats polynomial(typename V::Floats x, typename V::Floats sum, float next,
                                                                    More... more) {
    return polynomial<V>(x, V::fma(sum, x, V::broadcast(next)), more...);
}

// least and greatest give their second argument where either is NaN.
template <class V>
inline __attribute__((always_inline)) typename V::Floats exponential(typename V::Floats given) {
    const auto x = V::least(V::broadcast(89.0f), V::greatest(V::broadcast(-105.0f), given));
    const auto n = V::nearest(V::times(x, V::broadcast(1.44269504088896341f)));
    auto r = V::fma(n, V::broadcast(-0.693359375f), x);  // ln 2 in two parts: n times the first is exact
    r = V::fma(n, V::broadcast(2.12194440e-4f), r);
    const auto tail = polynomial<V>(r, V::broadcast(1.9875691500e-4f), 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                    1.6666665459e-1f, 5.0000001201e-1f);
    const auto sum = V::plus(V::fma(V::times(r, r), tail, r), V::broadcast(1.0f));
    return V::scaled(sum, n);
}

template <class V>
inline __attribute__((always_inline)) typename V::Floats tangent(typename V::Floats x) {
    const auto square = V::times(x, x);
    const auto tail = polynomial<V>(square, V::broadcast(-5.70498872745e-3f), 2.06390887954e-2f, -5.37397155531e-2f,
                                    1.33314422036e-1f, -3.33332819422e-1f);
    const auto near = V::fma(V::times(square, x), tail, x);
    const auto e = exponential<V>(V::plus(x, x));  // tanh x = 1 - 2 / (e^2x + 1)
    const auto far = V::plus(V::broadcast(1.0f), V::over(V::broadcast(-2.0f), V::plus(e, V::broadcast(1.0f))));
    return V::where_below(square, 0.390625f, near, far);
}

}  // namespace
}  // namespace opkit::isa
