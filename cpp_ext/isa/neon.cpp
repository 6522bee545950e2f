// NEON of 64-bit Arm: 32 registers of 4 float32. A tile is 8 x 12: 24 sums, three vectors of b, one broadcast of a.
#if defined(__aarch64__)
#include <arm_neon.h>
#include <stddef.h>

#include "../attention/decode.hpp"
#include "../attention/vectors_plain.hpp"
#include "table.hpp"
#include "vector_gemm.hpp"

namespace opkit::isa {
namespace {

struct Vectors {
    using Floats = float32x4_t;
    using Words = uint32x4_t;
    using Mask = int64_t;  // there are no masks: the number of lanes, which go through memory
    static constexpr int kLanes = 4, kRows = 8, kPairRows = 8, kCols = 3;

    static Mask mask(int64_t lanes) { return lanes; }
    static Floats zero() { return vdupq_n_f32(0.0f); }
    static Floats load(const float* at) { return vld1q_f32(at); }
    static Floats load(const float* at, Mask lanes) { return floats(words(at, lanes)); }
    static void store(float* at, Floats value) { vst1q_f32(at, value); }
    static void store(float* at, Floats value, Mask lanes) {
        float all[4];
        vst1q_f32(all, value);
        __builtin_memcpy(at, all, static_cast<size_t>(lanes) * 4);
    }
    static Words words(const void* at) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(at))); }
    static Words words(const void* at, Mask lanes) {
        uint32_t all[4] = {};
        __builtin_memcpy(all, at, static_cast<size_t>(lanes) * 4);
        return vld1q_u32(all);
    }
    static Floats floats(Words words) { return vreinterpretq_f32_u32(words); }
    static Floats even(Words pairs) { return floats(vshlq_n_u32(pairs, 16)); }
    static Floats odd(Words pairs) { return floats(vandq_u32(pairs, vdupq_n_u32(0xFFFF0000u))); }
    static Floats broadcast(float value) { return vdupq_n_f32(value); }
    static Floats plus(Floats a, Floats b) { return vaddq_f32(a, b); }
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

constexpr Table make_table() {
    Table table{"neon", {"neon"}};
    table.bf16_to_f32 = widen<Vectors>;
    table.f32_to_bf16 = narrow<Vectors>;
    table.pack_b_bf16 = pack_pairs<Vectors>;
    table.gemm_block_bf16 = gemm_pairs<ProductBf16<Vectors>>;
    table.gemm_block_f32 = gemm_f32<Vectors>;
    table.attend_decode = attention::attend_decode<attention::PlainVectors>;
    return table;
}

}  // namespace

extern const Table neon;
constexpr Table neon = make_table();

}  // namespace opkit::isa
#endif
