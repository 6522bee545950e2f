"""The narrow floats as bits in an unsigned short, to f32 and back, rounding to the nearest, halves to even.

bf16 is the upper half of an f32; rounding adds half of the last place, less one where the kept part is even. NaN, which
that would make infinite or a number, gets its quiet bit instead. The choice is made of 32 bits, by a comparison of floats:
so vectors are narrowed once, and AVX2 has no comparison of unsigned integers. f16 by bits, where the compiler has no
instruction: a product with 2**112 rescales normal and subnormal numbers alike, and adding a power of two rounds at the
place it has.
"""

from __future__ import annotations

_TO_F16 = """\
OPK_INLINE unsigned short opk_f32_to_f16(float x) {
    const unsigned bits = opk_bits_f32(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const unsigned odd = magnitude >> 13 & 1u;
    const unsigned normal = (magnitude + 0xfffu + odd - 0x38000000u) >> 13;
    const unsigned subnormal = opk_bits_f32(opk_from_bits_f32(magnitude) + 0.5f) - 0x3f000000u;
    const unsigned large = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u;
    const unsigned finite = magnitude < 0x38800000u ? subnormal : normal;
    return (unsigned short)(sign | (magnitude >= 0x477ff000u ? large : finite));
}
"""

_FROM_F16 = """\
OPK_INLINE float opk_f16_to_f32(unsigned short h) {
    const unsigned sign = (unsigned)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    const float finite = opk_from_bits_f32(magnitude << 13) * 0x1p+112f;
    const unsigned large = magnitude << 13 | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
    return opk_from_bits_f32(sign | (magnitude >= 0x7c00u ? large : opk_bits_f32(finite)));
}
"""

_TO_BF16 = """\
OPK_INLINE unsigned short opk_f32_to_bf16(float x) {
    const unsigned bits = opk_bits_f32(x);
    const unsigned rounded = bits + (0x7fffu + (bits >> 16 & 1u)), quiet = bits | 0x400000u;
    return (unsigned short)((x != x ? quiet : rounded) >> 16);
}
"""

_FROM_BF16 = """\
OPK_INLINE float opk_bf16_to_f32(unsigned short h) {
    return opk_from_bits_f32((unsigned)h << 16);
}
"""

TEXT = {
    "f16_to_f32": _FROM_F16,
    "f32_to_f16": _TO_F16,
    "bf16_to_f32": _FROM_BF16,
    "f32_to_bf16": _TO_BF16,
}
