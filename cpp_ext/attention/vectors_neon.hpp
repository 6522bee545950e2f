// What attention needs of NEON besides isa/neon_vectors.hpp. A group is 6 x 16: 24 sums, four vectors of b.
#pragma once

#include "../isa/neon_vectors.hpp"
#include "elements.hpp"
#include "transpose.hpp"

namespace opkit::attention {
namespace {

struct NeonVectors : isa::NeonVectors {
    static constexpr int kGroup = 6, kGroupCols = 4, kColumnGroup = 4, kColumnGroupCols = 4;
    static constexpr int kSums = 16, kMaxRows = 16;
    static constexpr float kLeastPower = -88.02969f;  // 2^-127, whose bits are those of 0

    static Floats times(Floats a, Floats b) { return vmulq_f32(a, b); }
    static Floats over(Floats a, Floats b) { return vdivq_f32(a, b); }
    static Floats fused_minus(Floats a, Floats b, Floats c) { return vfmaq_f32(vnegq_f32(c), a, b); }
    static Floats greatest(Floats a, Floats b) { return vmaxq_f32(a, b); }
    static Floats least(Floats a, Floats b) { return vminq_f32(a, b); }
    static Floats nearest(Floats x) { return vrndnq_f32(x); }
    static Floats scaled(Floats power, Floats n, Floats) {
        const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
        return vmulq_f32(power, vreinterpretq_f32_s32(exponent));
    }
    static float greatest_lane(Floats x) { return vmaxvq_f32(x); }
    static float sum_of_lanes(Floats x) { return vaddvq_f32(x); }
    static Words bits(uint64_t visible, int vector) {
        const Words each = {1, 2, 4, 8};
        return vtstq_u32(vdupq_n_u32(static_cast<uint32_t>(visible >> (4 * vector))), each);
    }
    static Floats where(Words chosen, Floats yes, Floats no) { return vbslq_f32(chosen, yes, no); }

    static Words part(const unsigned char* at, int64_t bytes) {
        unsigned char all[16] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(bytes));
        return words(all);
    }
    static Words as_words(Floats a) { return vreinterpretq_u32_f32(a); }
    static Floats from(F32, const void* at) { return floats(words(at)); }
    static uint16x4_t halves(const void* at) { return vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t*>(at))); }
    static Floats from(Bf16, const void* at) { return floats(vshll_n_u16(halves(at), 16)); }
    static Floats from(F16, const void* at) { return vcvt_f32_f16(vreinterpret_f16_u16(halves(at))); }
    static int32x4_t bytes(const void* at) {
        uint32_t four;
        __builtin_memcpy(&four, at, 4);
        return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
    }
    static Floats from(I8, const void* at) { return vcvtq_f32_s32(bytes(at)); }
    static Floats from(F8, const void* at) {
        const Words both = vreinterpretq_u32_s32(bytes(at)), magnitude = vandq_u32(both, vdupq_n_u32(0x7F));
        const Floats value = vmulq_f32(floats(vshlq_n_u32(magnitude, 20)), vdupq_n_f32(kF8Scale));
        const Words nan = vceqq_u32(magnitude, vdupq_n_u32(0x7F));
        const Words bits = vbslq_u32(nan, vdupq_n_u32(0x7FC00000u), as_words(value));
        return floats(vorrq_u32(bits, vandq_u32(both, vdupq_n_u32(0x80000000u))));
    }

    static int16x8_t pairs_of(Words a) { return vreinterpretq_s16_u32(a); }
    static Words even_bytes(Words a) { return vreinterpretq_u32_s16(vshrq_n_s16(vshlq_n_s16(pairs_of(a), 8), 8)); }
    static Words odd_bytes(Words a) { return vreinterpretq_u32_s16(vshrq_n_s16(pairs_of(a), 8)); }
    static Words no_words() { return vdupq_n_u32(0); }
    static Words add_words(Words a, Words b) { return vaddq_u32(a, b); }
    static Words add_pairs(Words sum, int32_t pair, Words pairs) {
        const int16x8_t left = vreinterpretq_s16_s32(vdupq_n_s32(pair)), right = pairs_of(pairs);
        const int32x4_t low = vmull_s16(vget_low_s16(left), vget_low_s16(right)), high = vmull_high_s16(left, right);
        return vaddq_u32(sum, vreinterpretq_u32_s32(vpaddq_s32(low, high)));
    }
    static Floats to_floats(Words a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }

    static inline __attribute__((always_inline)) void transpose(Words (&w)[4]) {
        const uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(w[0], w[1])), b = vreinterpretq_u64_u32(vtrn2q_u32(w[0], w[1]));
        const uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(w[2], w[3])), d = vreinterpretq_u64_u32(vtrn2q_u32(w[2], w[3]));
        w[0] = vreinterpretq_u32_u64(vtrn1q_u64(a, c));
        w[1] = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
        w[2] = vreinterpretq_u32_u64(vtrn2q_u64(a, c));
        w[3] = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
    }
    static void transposed(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
        turn_words<NeonVectors>(rows, pitch, keys, words, out, out_pitch);
    }
};

}  // namespace
}  // namespace opkit::attention
