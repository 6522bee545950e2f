// Vectors of four floats for a compiler that knows them (GCC and Clang), on any processor. A group is 4 x 8.
//
// It is the model of what attention needs of an ISA's vectors, besides what isa/vector_products.hpp and isa/vector_convert.hpp do:
//   kGroup, kGroupCols   rows that are computed together, and vectors of keys or columns; kColumnGroup, kColumnGroupCols: of a transposed tile
//   kLeastPower          x whose e^x is 0 by way of `scaled`
//   kSums, kMaxRows      of decoding: vectors of sums that registers hold, and the most rows that share keys
//   greatest, least      NaN where the second operand is
//   scaled(x, n, y)      x 2^n, at most 128; 0 where y, of which n is the nearest integer, is below -126.5 (or subnormal); NaN stays
//   bits(visible, n)     which lanes of vector n are visible; where(chosen, yes, no)
//   from(type, at)       a vector's worth of elements (elements.hpp), as floats; part(at, bytes): words, zeros after so many bytes
//   even_bytes, odd_bytes, add_pairs   words of four int8 as pairs of int16: bytes 0 and 2, 1 and 3; sum + the products of a pair
//   transpose(w)         w[i] lane j becomes w[j] lane i
//   transposed           transpose.hpp's turn_words, by the squares that suit
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "elements.hpp"
#include "transpose.hpp"

namespace opkit::attention {
namespace {

struct PlainVectors {
    using Floats = float __attribute__((vector_size(16)));
    using Words = uint32_t __attribute__((vector_size(16)));
    using Ints = int32_t __attribute__((vector_size(16)));
    static constexpr int kLanes = 4, kGroup = 4, kGroupCols = 2, kColumnGroup = 4, kColumnGroupCols = 2;
    static constexpr int kSums = 8, kMaxRows = 8;
    static constexpr float kLeastPower = -150.0f;

    template <class T>
    static T taken(const void* at) {
        T value;
        __builtin_memcpy(&value, at, sizeof value);
        return value;
    }
    static Floats zero() { return Floats{}; }
    static Floats load(const float* at) { return taken<Floats>(at); }
    static void store(float* at, Floats value) { __builtin_memcpy(at, &value, sizeof value); }
    static Words words(const void* at) { return taken<Words>(at); }
    static Floats floats(Words words) { return (Floats)words; }
    static Floats even(Words pairs) { return (Floats)(pairs << 16); }
    static Floats broadcast(float x) { return Floats{x, x, x, x}; }
    static Floats plus(Floats a, Floats b) { return a + b; }
    static Floats minus(Floats a, Floats b) { return a - b; }
    static Floats times(Floats a, Floats b) { return a * b; }
    static Floats over(Floats a, Floats b) { return a / b; }
    static Floats fma(Floats a, Floats b, Floats sum) { return a * b + sum; }
    static Floats fused_minus(Floats a, Floats b, Floats c) { return a * b - c; }
    static Floats where(Ints chosen, Floats yes, Floats no) { return (Floats)(((Ints)yes & chosen) | ((Ints)no & ~chosen)); }
    static Floats greatest(Floats a, Floats b) { return where(a > b, a, b); }
    static Floats least(Floats a, Floats b) { return where(a < b, a, b); }
    // By a number whose last bit is worth 1. What is beyond 2^22 has no part after the point, or is beyond use.
    static Floats nearest(Floats x) {
        const Floats shift = broadcast(12582912.0f);
        return (x + shift) - shift;
    }
    static Floats scaled(Floats power, Floats n, Floats x) {
        const Floats low = broadcast(-126.0f);
        const Ints exponent = (__builtin_convertvector(where(n >= low, n, low), Ints) + 127) << 23;
        return (Floats)((Ints)(power * (Floats)exponent) & ~(x < low));
    }
    static float greatest_lane(Floats x) {
        const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }
    static float sum_of_lanes(Floats x) { return (x[0] + x[1]) + (x[2] + x[3]); }
    static Ints bits(uint64_t visible, int vector) {
        const int32_t four = static_cast<int32_t>(visible >> (4 * vector) & 15);
        const Ints each = {1, 2, 4, 8};
        return (Ints{four, four, four, four} & each) == each;
    }
    static void widen(const uint16_t* in, float* out) {
        for (int i = 0; i < kLanes; ++i) out[i] = isa::widen_one(in[i]);
    }

    static Words part(const unsigned char* at, int64_t bytes) {
        unsigned char all[16] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(bytes));
        return words(all);
    }
    static Words as_words(Floats a) { return (Words)a; }
    static Floats from(F32, const void* at) { return taken<Floats>(at); }
    template <class T>
    static Floats from(T type, const void* at) {
        const auto* first = static_cast<const unsigned char*>(at);
        return Floats{one(type, first), one(type, first + T::kBytes), one(type, first + 2 * T::kBytes),
                      one(type, first + 3 * T::kBytes)};
    }
    static Words even_bytes(Words a) { return (Words)((Ints)(a << 24) >> 24 & 0xFFFF) | (Words)((Ints)(a << 8) >> 24) << 16; }
    static Words odd_bytes(Words a) { return (Words)((Ints)(a << 16) >> 24 & 0xFFFF) | (Words)((Ints)a >> 24) << 16; }
    static Words no_words() { return Words{}; }
    static Words add_words(Words a, Words b) { return a + b; }
    static Words add_pairs(Words sum, int32_t pair, Words pairs) {
        const Ints low = (Ints)(pairs << 16) >> 16, high = (Ints)pairs >> 16;
        return sum + (Words)(low * static_cast<int16_t>(pair)) + (Words)(high * (pair >> 16));
    }
    static Floats to_floats(Words a) { return __builtin_convertvector((Ints)a, Floats); }
    static void transpose(Words (&w)[4]) {
        Words t[4];
        for (int i = 0; i < 4; ++i) t[i] = Words{w[0][i], w[1][i], w[2][i], w[3][i]};
        for (int i = 0; i < 4; ++i) w[i] = t[i];
    }
    static void transposed(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
        turn_words<PlainVectors>(rows, pitch, keys, words, out, out_pitch);
    }
};

}  // namespace
}  // namespace opkit::attention
