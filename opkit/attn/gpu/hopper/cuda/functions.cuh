// What the text of users' functions calls (opkit/attn/gpu/hopper/functions.py), and the tensors and numbers that they capture.
#pragma once

#include "sm90.cuh"

namespace {

using namespace sm90;

// A captured tensor with its strides by dimension.
struct Captured {
    const void* data;
    int64_t by[4];
};
struct Functions {
    Captured tensors[6];
    int64_t numbers[24];
    uint32_t factors[24];  // of integers that divide
};

constexpr float LOG2_OF_E = 1.4426950408889634f;

// A coordinate in a tensor: a negative one counts from the end, and none is out of range.
template <typename I, typename Size>
SM90 int within(I at, Size size) {
    const decltype(at + size) place = at < 0 ? at + size : at;
    return int(place < 0 ? 0 : place < size ? place : size - 1);
}
template <typename E>
SM90 E element_of(const Captured& tensor, int64_t at) { return static_cast<const E*>(tensor.data)[at]; }

// Integers: by zero, 0; floor_of and rem_of as in Python.
template <typename I>
SM90 I div_of(I a, I b) { return b == 0 ? I(0) : I(a / b); }
template <typename I>
SM90 I fmod_of(I a, I b) { return b == 0 ? I(0) : I(a % b); }
template <typename I>
SM90 I floor_of(I a, I b) {
    const I quotient = div_of(a, b), rest = I(a - quotient * b);
    return b != 0 && rest != 0 && (rest < 0) != (b < 0) ? I(quotient - 1) : quotient;
}
template <typename I>
SM90 I rem_of(I a, I b) {
    const I rest = fmod_of(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? I(rest + b) : rest;
}

// A captured integer that divides others, which are multiplied with its reciprocal instead (Granlund and Montgomery, "Division by
// Invariant Integers using Multiplication", 1994): 2^(31 + shift) / value, rounded up, is near enough for numbers of 31 bits.
struct Divisor {
    int value, shift;
    uint32_t factor;  // 0: there is none
};
SM90 Divisor divisor(const Functions& functions, int place) {
    const int value = int(functions.numbers[place]);
    return {value, value > 1 ? 32 - __clz(value - 1) : 0, functions.factors[place]};
}
static __device__ __noinline__ int divided_by_other(int a, int b) { return floor_of(a, b); }
SM90 int floor_of(int a, Divisor by) {
    if (by.factor == 0) return divided_by_other(a, by.value);
    const int sign = a >> 31;  // of a negative a, -1 - (-1 - a) / b
    return int(__umulhi(uint32_t(a ^ sign) << 1, by.factor) >> by.shift) ^ sign;
}
SM90 int rem_of(int a, Divisor by) {
    return by.value == 0 ? 0 : int(uint32_t(a) - uint32_t(floor_of(a, by)) * uint32_t(by.value));
}
template <typename I>
SM90 I pow_of(I a, I b) {
    if (b < 0) return a == 1 ? I(1) : a == I(-1) ? (b & 1 ? a : I(1)) : I(0);
    I power = 1;
    for (; b > 0; b >>= 1) {
        if (b & 1) power *= a;
        a *= a;
    }
    return power;
}
template <typename I>
SM90 I shl_of(I a, I b) { return b < 0 || b >= I(8 * sizeof(I)) ? I(0) : I(a << b); }
template <typename I>
SM90 I shr_of(I a, I b) { return b < 0 || b >= I(8 * sizeof(I)) ? I(a < 0 ? -1 : 0) : I(a >> b); }

// Floats, and what compares: NaN if one of them is.
template <typename F>
SM90 F min_of(F a, F b) { return a < b || a != a ? a : b; }
template <typename F>
SM90 F max_of(F a, F b) { return a > b || a != a ? a : b; }
SM90 float remainder_of(float a, float b) {
    const float rest = fmodf(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
SM90 double remainder_of(double a, double b) {
    const double rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
SM90 float quotient(float a, float b) { return a * reciprocal_approx(b); }  // exact to two units in the last place
SM90 float exp_of(float x) { return exp2_approx(x * LOG2_OF_E); }
SM90 float tanh_of(float x) {  // exact to 2e-7
    const float e = exp2_approx(fabsf(x) * (-2 * LOG2_OF_E)), t = (1 - e) * reciprocal_approx(1 + e);
    return x < 0 ? -t : t;
}

}  // namespace
