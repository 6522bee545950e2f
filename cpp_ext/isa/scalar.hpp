// bf16 one value at a time, by integers, so that neither rounding modes nor flags of the processor matter.
#pragma once

#include <stdint.h>

namespace opkit::isa {
namespace {

inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widen_one(uint16_t value) { return float_of(uint32_t{value} << 16); }

inline uint16_t narrow_one(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Two rows of b, of which the second may be missing, to pairs.
inline void pair_rows(const uint16_t* even, const uint16_t* odd, uint16_t* out, int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
        out[2 * j] = even[j];
        out[2 * j + 1] = odd ? odd[j] : uint16_t{0};
    }
}

}  // namespace
}  // namespace opkit::isa
