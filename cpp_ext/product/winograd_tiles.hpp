// The kernels of convolutions by Winograd's method (winograd.cpp): the transforms of input and output tiles. V is as in tiles.hpp, and
// has minus(a, b).
//
// A tile of M x M results has (M + 2) x (M + 2) points. Lines of a tile are transformed, and then lines of what comes out, across them.
#pragma once

#include "tiles.hpp"

namespace opkit::product {
namespace {

// By the points 0, 1, -1 and infinity: rows of B^T and A^T in Lavin's and Gray's notation.
template <class V>
inline __attribute__((always_inline)) void transform_input(const typename V::Floats (&d)[4], typename V::Floats (&out)[4]) {
    out[0] = V::minus(d[0], d[2]);
    out[1] = V::plus(d[1], d[2]);
    out[2] = V::minus(d[2], d[1]);
    out[3] = V::minus(d[1], d[3]);
}

template <class V>
inline __attribute__((always_inline)) void transform_output(const typename V::Floats (&m)[4], typename V::Floats (&out)[2]) {
    out[0] = V::plus(V::plus(m[0], m[1]), m[2]);
    out[1] = V::minus(V::minus(m[1], m[2]), m[3]);
}

// By the points 0, a, -a, b, -b and infinity.
template <class V>
inline __attribute__((always_inline)) void transform_input(const typename V::Floats (&d)[6], typename V::Floats (&out)[6]) {
    using Floats = typename V::Floats;
    constexpr float a = kPointA, b = kPointB;
    const Floats both = V::broadcast(-(a * a + b * b)), product = V::broadcast(a * a * b * b);
    const Floats even_a = V::fma(V::broadcast(-b * b), d[2], d[4]), odd_a = V::fma(V::broadcast(-b * b), d[1], d[3]);
    const Floats even_b = V::fma(V::broadcast(-a * a), d[2], d[4]), odd_b = V::fma(V::broadcast(-a * a), d[1], d[3]);
    out[0] = V::fma(product, d[0], V::fma(both, d[2], d[4]));
    out[1] = V::fma(V::broadcast(a), odd_a, even_a);
    out[2] = V::fma(V::broadcast(-a), odd_a, even_a);
    out[3] = V::fma(V::broadcast(b), odd_b, even_b);
    out[4] = V::fma(V::broadcast(-b), odd_b, even_b);
    out[5] = V::fma(product, d[1], V::fma(both, d[3], d[5]));
}

template <class V>
inline __attribute__((always_inline)) void transform_output(const typename V::Floats (&m)[6], typename V::Floats (&out)[4]) {
    using Floats = typename V::Floats;
    constexpr float a = kPointA, b = kPointB;
    const Floats even_a = V::plus(m[1], m[2]), odd_a = V::minus(m[1], m[2]);
    const Floats even_b = V::plus(m[3], m[4]), odd_b = V::minus(m[3], m[4]), zero = V::zero();
    out[0] = V::plus(V::plus(m[0], even_a), even_b);
    out[1] = V::fma(V::broadcast(b), odd_b, V::fma(V::broadcast(a), odd_a, zero));
    out[2] = V::fma(V::broadcast(b * b), even_b, V::fma(V::broadcast(a * a), even_a, zero));
    out[3] = V::fma(V::broadcast(b * b * b), odd_b, V::fma(V::broadcast(a * a * a), odd_a, m[5]));
}

template <class V, int M>
void winograd_input_of(const WinogradInput& call) {
    using Floats = typename V::Floats;
    constexpr int N = M + 2;
    for (int64_t tile = 0; tile < call.tiles; ++tile) {
        const float* const* pixels = call.pixels + tile * N * N;
        float* points = call.points + tile * call.pitch;
        for (int64_t channel = 0; channel < call.channels; channel += V::kLanes) {
            Floats half[N][N];
            OPKIT_UNROLL
            for (int j = 0; j < N; ++j) {
                Floats line[N], out[N];
                OPKIT_UNROLL
                for (int i = 0; i < N; ++i) line[i] = V::load(pixels[i * N + j] + channel);
                transform_input<V>(line, out);
                OPKIT_UNROLL
                for (int i = 0; i < N; ++i) half[i][j] = out[i];
            }
            OPKIT_UNROLL
            for (int i = 0; i < N; ++i) {
                Floats out[N];
                transform_input<V>(half[i], out);
                OPKIT_UNROLL
                for (int j = 0; j < N; ++j) V::store(points + (i * N + j) * call.point_pitch + channel, out[j]);
            }
        }
    }
}

template <class V, int M>
void winograd_output_of(const WinogradOutput& call) {
    using Floats = typename V::Floats;
    constexpr int N = M + 2;
    for (int64_t tile = 0; tile < call.tiles; ++tile) {
        const int64_t* places = call.places + tile * M * M;
        const float* sums = call.sums + tile * call.pitch;
        for (int64_t column = 0; column < call.columns; column += V::kLanes) {
            Floats half[M][N];
            OPKIT_UNROLL
            for (int j = 0; j < N; ++j) {
                Floats line[N], out[M];
                OPKIT_UNROLL
                for (int i = 0; i < N; ++i) line[i] = V::load(sums + (i * N + j) * call.point_pitch + column);
                transform_output<V>(line, out);
                OPKIT_UNROLL
                for (int i = 0; i < M; ++i) half[i][j] = out[i];
            }
            Floats check = V::load(call.checks + tile * kPanel);
            OPKIT_UNROLL
            for (int i = 0; i < M; ++i) {
                Floats out[M];
                transform_output<V>(half[i], out);
                OPKIT_UNROLL
                for (int j = 0; j < M; ++j) {
                    check = V::fma(out[j], V::zero(), check);
                    const int64_t place = places[i * M + j];
                    if (place < 0) continue;
                    if (call.bias) out[j] = V::plus(out[j], V::load(call.bias + column));
                    if (call.addend) out[j] = V::plus(out[j], V::load(call.addend + place + column));
                    if (call.activation == kRelu) out[j] = V::positive(out[j]);
                    V::store(call.y + place + column, out[j]);
                }
            }
            V::store(call.checks + tile * kPanel, check);
        }
    }
}

template <class V>
void winograd_input(const WinogradInput& call) {
    call.tile == 2 ? winograd_input_of<V, 2>(call) : winograd_input_of<V, 4>(call);
}

template <class V>
void winograd_output(const WinogradOutput& call) {
    call.tile == 2 ? winograd_output_of<V, 2>(call) : winograd_output_of<V, 4>(call);
}

}  // namespace
}  // namespace opkit::product
