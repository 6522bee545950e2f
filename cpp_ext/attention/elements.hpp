// The elements that attention's kernels read, as tags, and their bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../isa/scalar.hpp"
#include "../isa/unroll.hpp"

namespace opkit::isa {
namespace {

struct F32 { static constexpr int kBytes = 4; };
struct Bf16 { static constexpr int kBytes = 2; };
struct F16 { static constexpr int kBytes = 2; };
struct I8 { static constexpr int kBytes = 1; };
struct F8 { static constexpr int kBytes = 1; };  // float8_e4m3fn

constexpr float kF16Scale = 0x1p112f;  // the bits of a float16 (float8), shifted by 13 (20), are the value times this less
constexpr float kF8Scale = 0x1p120f;

inline float one(F32, const unsigned char* at) {
    float value;
    __builtin_memcpy(&value, at, 4);
    return value;
}

inline uint32_t half(const unsigned char* at) {
    uint16_t value;
    __builtin_memcpy(&value, at, 2);
    return value;
}

inline float one(Bf16, const unsigned char* at) { return float_of(half(at) << 16); }

inline float one(F16, const unsigned char* at) {
    const uint32_t bits = half(at), magnitude = bits & 0x7FFF, sign = (bits & 0x8000) << 16;
    const float value = float_of(magnitude << 13) * kF16Scale;
    if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    return sign ? -value : value;
}

inline float one(I8, const unsigned char* at) { return static_cast<float>(static_cast<int8_t>(*at)); }

inline float one(F8, const unsigned char* at) {
    const uint32_t magnitude = *at & 0x7F;
    const float value = magnitude == 0x7F ? __builtin_nanf("") : float_of(magnitude << 20) * kF8Scale;
    return *at & 0x80 ? -value : value;
}

}  // namespace
}  // namespace opkit::isa
