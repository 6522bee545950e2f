// NEON of 64-bit Arm: 32 registers of 4 float32.
#pragma once

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

namespace opkit::isa {
namespace {

struct NeonVectors {
    using Floats = float32x4_t;
    using Words = uint32x4_t;
    static constexpr int kLanes = 4;

    static Floats zero() { return vdupq_n_f32(0.0f); }
    static Floats load(const float* at) { return vld1q_f32(at); }
    static void store(float* at, Floats value) { vst1q_f32(at, value); }
    static Words words(const void* at) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(at))); }
    static Floats floats(Words words) { return vreinterpretq_f32_u32(words); }
    static Floats even(Words pairs) { return floats(vshlq_n_u32(pairs, 16)); }
    static Floats broadcast(float value) { return vdupq_n_f32(value); }
    static Floats plus(Floats a, Floats b) { return vaddq_f32(a, b); }
    static Floats minus(Floats a, Floats b) { return vsubq_f32(a, b); }
    static Floats fma(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }

    static void widen(const uint16_t* in, float* out) { store(out, floats(vshll_n_u16(vld1_u16(in), 16))); }
    static void narrow(const float* in, uint16_t* out) {
        const uint32x4_t bits = words(in);
        const uint32x4_t tie = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(tie, vdupq_n_u32(0x7FFF))), 16);
        const uint32x4_t nan = vcgtq_u32(vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)), vdupq_n_u32(0x7F800000));
        vst1_u16(out, vmovn_u32(vbslq_u32(nan, vdupq_n_u32(0x7FC0), rounded)));
    }
    static void interleave(const uint16_t* even, const uint16_t* odd, uint16_t* out) {
        const uint16x4x2_t rows = {{vld1_u16(even), vld1_u16(odd)}};
        vst2_u16(out, rows);
    }
};

}  // namespace
}  // namespace opkit::isa
