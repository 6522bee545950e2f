// float16 one value at a time, by integers.
#pragma once

#include <stdint.h>

#include "../isa/scalar.hpp"

namespace opkit::attention {
namespace {

constexpr float kF16Scale = 0x1p112f;  // the bits of a float16, shifted by 13, are the value times this less

inline float widen_half(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7FFFu;
    const float size = isa::float_of(rest << 13) * kF16Scale;  // exact, for subnormal values too
    uint32_t bits;
    __builtin_memcpy(&bits, &size, sizeof bits);
    const uint32_t special = rest >= 0x7C00u ? 0x7F800000u : 0u;  // without a branch, so that loops of it become vectors
    return isa::float_of(sign | special | bits);
}

// To nearest, ties to even.
inline uint16_t narrow_half(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) return sign | 0x7E00u;
    if (bits >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and more
    if (bits < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
        const float shifted = isa::float_of(bits) + 0.5f;
        __builtin_memcpy(&bits, &shifted, sizeof bits);
        return sign | static_cast<uint16_t>(bits - 0x3F000000u);
    }
    return sign | static_cast<uint16_t>((bits - 0x38000000u + 0xFFFu + (bits >> 13 & 1u)) >> 13);
}

}  // namespace
}  // namespace opkit::attention
