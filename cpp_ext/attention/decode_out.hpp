// float32 to the results' element type, to nearest, ties to even, with the instructions of the architecture's base.
#pragma once

#include <cstring>

#include "../isa/scalar.hpp"
#include "decode_task.hpp"

namespace opkit {
namespace {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Adding a float whose last place is the float16's rounds as the processor does.
inline uint16_t to_half(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
    if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
    if (magnitude < 0x38800000)
        return static_cast<uint16_t>(sign | (bits_of(isa::float_of(magnitude) + 0.5f) - bits_of(0.5f)));
    const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

inline void store(const float* values, int64_t count, ElementType type, unsigned char* out) {
    if (type == kF32) {
        std::memcpy(out, values, static_cast<size_t>(count) * 4);
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t value = type == kBf16 ? isa::narrow_one(values[i]) : to_half(values[i]);
        std::memcpy(out + 2 * i, &value, 2);
    }
}

}  // namespace
}  // namespace opkit
