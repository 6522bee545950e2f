// Four lanes by the vector extensions of GCC and Clang, which every processor runs: SSE2 and NEON in particular.
#pragma once

#include "elements.hpp"

namespace opkit::isa {
namespace {

struct Lanes {
    typedef float Floats __attribute__((vector_size(16)));
    typedef int32_t Words __attribute__((vector_size(16)));
    static constexpr int kLanes = 4, kSums = 8, kMaxRows = 8;

    static Floats zero() { return Floats{}; }
    static Floats load(const float* at) { return from(F32(), at); }
    static void store(float* at, Floats value) { __builtin_memcpy(at, &value, 16); }
    static Floats broadcast(float value) { return Floats{value, value, value, value}; }
    static Floats plus(Floats a, Floats b) { return a + b; }
    static Floats fma(Floats a, Floats b, Floats sum) { return a * b + sum; }
    static Floats times(Floats a, Floats b) { return a * b; }
    static Floats over(Floats a, Floats b) { return a / b; }
    static Floats least(Floats a, Floats b) { return a < b ? a : b; }
    static Floats greatest(Floats a, Floats b) { return a > b ? a : b; }
    static Floats nearest(Floats a) { return (a + broadcast(12582912.0f)) - broadcast(12582912.0f); }
    static Floats scaled(Floats a, Floats n) {
        const Words whole = __builtin_convertvector(n, Words), half = whole >> 1;
        return a * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23);
    }
    static Floats where_below(Floats a, float limit, Floats then, Floats otherwise) {
        return a < broadcast(limit) ? then : otherwise;
    }
    static float sum(Floats a) { return (a[0] + a[1]) + (a[2] + a[3]); }
    static float maximum(Floats a) {
        const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
        return low > high ? low : high;
    }

    static Words words(const void* at) {
        Words value;
        __builtin_memcpy(&value, at, 16);
        return value;
    }
    static Words part(const unsigned char* at, int64_t bytes) {
        unsigned char all[16] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(bytes));
        return words(all);
    }
    static Words bits(Floats a) { return (Words)a; }
    static Floats floats(Words bits) { return (Floats)bits; }
    static Floats from(F32, const void* at) { return floats(words(at)); }
    template <class T>
    static Floats from(T type, const void* at) {
        const auto* first = static_cast<const unsigned char*>(at);
        return Floats{one(type, first), one(type, first + T::kBytes), one(type, first + 2 * T::kBytes),
                      one(type, first + 3 * T::kBytes)};
    }

    static Words even_bytes(Words a) { return ((a << 24 >> 24) & 0xFFFF) | (a << 8 >> 24 << 16); }
    static Words odd_bytes(Words a) { return ((a << 16 >> 24) & 0xFFFF) | (a >> 24 << 16); }
    static Words no_words() { return Words{}; }
    static Words add_words(Words a, Words b) { return a + b; }
    static Words add_pairs(Words sum, int32_t pair, Words pairs) {
        return sum + (pairs << 16 >> 16) * static_cast<int16_t>(pair) + (pairs >> 16) * (pair >> 16);
    }
    static Floats to_floats(Words a) { return __builtin_convertvector(a, Floats); }

    static void transpose(Words (&w)[4]) {
        Words t[4];
        for (int i = 0; i < 4; ++i) t[i] = Words{w[0][i], w[1][i], w[2][i], w[3][i]};
        for (int i = 0; i < 4; ++i) w[i] = t[i];
    }
};

}  // namespace
}  // namespace opkit::isa
