// The elements that attention's kernels read, as tags, and their bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../isa/scalar.hpp"
#include "../isa/unroll.hpp"
#include "half.hpp"

namespace opkit::attention {
namespace {

struct F32 { static constexpr int kBytes = 4; };
struct Bf16 { static constexpr int kBytes = 2; };
struct F16 { static constexpr int kBytes = 2; };
struct I8 { static constexpr int kBytes = 1; };
struct F8 { static constexpr int kBytes = 1; };  // float8_e4m3fn

constexpr float kF8Scale = 0x1p120f;  // the bits of a float8, shifted by 20, are the value times this less

inline float one(F32, const unsigned char* at) {
    float value;
    __builtin_memcpy(&value, at, 4);
    return value;
}

inline uint16_t two_bytes(const unsigned char* at) {
    uint16_t value;
    __builtin_memcpy(&value, at, 2);
    return value;
}

inline float one(Bf16, const unsigned char* at) { return isa::widen_one(two_bytes(at)); }

inline float one(F16, const unsigned char* at) { return widen_half(two_bytes(at)); }

inline float one(I8, const unsigned char* at) { return static_cast<float>(static_cast<int8_t>(*at)); }

inline float one(F8, const unsigned char* at) {
    const uint32_t magnitude = *at & 0x7F;
    const float value = magnitude == 0x7F ? __builtin_nanf("") : isa::float_of(magnitude << 20) * kF8Scale;
    return *at & 0x80 ? -value : value;
}

}  // namespace
}  // namespace opkit::attention
