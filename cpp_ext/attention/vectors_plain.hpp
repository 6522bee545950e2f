// Vectors of four floats for a compiler that knows them (GCC and Clang), on any processor. A group is 4 x 8.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "transpose.hpp"

namespace opkit::attention {
namespace {

struct PlainVectors : PlainTranspose {
    using Floats = float __attribute__((vector_size(16)));
    using Words = uint32_t __attribute__((vector_size(16)));
    using Ints = int32_t __attribute__((vector_size(16)));
    static constexpr int kLanes = 4, kRows = 4, kPairRows = 4, kCols = 2, kGroup = 4, kGroupCols = 2, kColumnGroup = 4;

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
    static Floats odd(Words pairs) { return (Floats)(pairs & 0xFFFF0000u); }
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
    static Ints bits(uint64_t visible, int vector) {
        const int32_t four = static_cast<int32_t>(visible >> (4 * vector) & 15);
        const Ints each = {1, 2, 4, 8};
        return (Ints{four, four, four, four} & each) == each;
    }
    static void widen(const uint16_t* in, float* out) {
        for (int i = 0; i < kLanes; ++i) out[i] = isa::widen_one(in[i]);
    }
};

}  // namespace
}  // namespace opkit::attention
