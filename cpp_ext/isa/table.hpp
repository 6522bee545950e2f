// The kernels tuned by hand, as a table of function pointers: one table an instruction set (ISA), filled by one .cpp file.
//
// To add a kernel: one row of OPKIT_ISA_KERNELS, and a function in every .cpp that has a better way than a narrower ISA. A
// pointer left null is inherited from the next narrower ISA; baseline.cpp leaves none null.
// To add an ISA: one .cpp that defines `const Table NAME`, and one line in CMakeLists.txt, where the order is the width.
//
// Every .cpp but baseline.cpp is compiled with flags that this processor may not have. Therefore, in such files and in the
// headers that they share:
// - all functions stand in an unnamed namespace and no C++ standard header is included. Of an inline function with a shared
//   name the linker keeps one copy, which could be the wide one, and narrow code would run it;
// - the table is constant data (constexpr). A function that filled it could store the pointers with wide instructions.
//
// What holds of the results:
// - f32_to_bf16 and pack_b_bf16 give the same bits on every ISA. Rounding is to nearest, ties to even; every
//   NaN becomes 0x7FC0, as in torch; subnormal values stay, whatever the MXCSR says. VCVTNEPS2BF16 flushes subnormal
//   values and keeps payloads of NaN, so no ISA uses it: rounding is done on integers everywhere.
// - attention_bf16 of avx512_bf16 and amx reads subnormal bf16 values as zero and flushes subnormal sums to zero, as VDPBF16PS
//   and TDPBF16PS do, whatever the MXCSR says. The others follow the thread's MXCSR or FPCR.
// - speed: rows that begin at multiples of 64 bytes are read faster, by up to a third with amx.
#pragma once

#include <stdint.h>

#include "../attention/block.hpp"
#include "../attention/decode_task.hpp"
#include "../product/block.hpp"

// name, parameters. All matrices are stored by rows, ld* is the distance of two rows in elements; every size may be zero.
// Matrices may have any alignment; an output overlaps no input. bf16 values travel as uint16_t.
//   f32_to_bf16: n values.
//   pack_b_bf16: b[k][n] to packed[(k + 1) / 2][n][2], pairs of consecutive k (the layout called VNNI); an odd k is padded
//     with zeros.
//   transpose_words: keys by rows, `pitch` words apart, to a tile out[words][attention::kKeys] (attention/block.hpp); what lies
//     beyond the last key is left as it is.
//   attention_*: a block of queries (attention/forward.hpp). attention_cells_*: rows, `pitch` elements apart, as cells, which are of
//     the ISA's own kind; attention_backward_*: rows against a tile of keys (attention/backward.hpp).
//   attend_decode: one part of attention with few queries; see attention/decode_task.hpp and decode.hpp.
//   product_f32, depthwise_f32: a part of a product or convolution with a packed weight; see product/block.hpp.
//   winograd_*_f32: the transforms of convolutions by Winograd's method, likewise.
#define OPKIT_ISA_KERNELS(KERNEL)                                                                                      \
    KERNEL(f32_to_bf16, (const float* in, uint16_t* out, int64_t n))                                                   \
    KERNEL(pack_b_bf16, (const uint16_t* b, int64_t ldb, uint16_t* packed, int64_t n, int64_t k))                      \
    KERNEL(transpose_words, (const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out))         \
    KERNEL(attention_f32, (const attention::Block& block))                                                             \
    KERNEL(attention_bf16, (const attention::Block& block))                                                            \
    KERNEL(attention_cells_f32, (const void* rows, int64_t pitch, int64_t count, int64_t elements, void* out))         \
    KERNEL(attention_cells_bf16, (const void* rows, int64_t pitch, int64_t count, int64_t elements, void* out))        \
    KERNEL(attention_backward_f32, (const attention::BackwardTile& tile))                                              \
    KERNEL(attention_backward_bf16, (const attention::BackwardTile& tile))                                             \
    KERNEL(attend_decode, (const attention::DecodeTask* task))                                                         \
    KERNEL(product_f32, (const product::Block& block))                                                                 \
    KERNEL(depthwise_f32, (const product::DepthwiseRow& row))                                                          \
    KERNEL(winograd_input_f32, (const product::WinogradInput& call))                                                   \
    KERNEL(winograd_output_f32, (const product::WinogradOutput& call))

namespace opkit::isa {

struct Table {
    const char* name = nullptr;
    const char* features[8] = {};         // names of cpu_features.hpp that must all be usable; a null pointer ends them
    bool (*permitted)() = nullptr;        // asks the operating system, once, where CPU features are not enough
    int64_t pair_rows = 0;                // of pairs of bf16 that attention_bf16 computes together; 0: as the next narrower ISA;
                                          // 0 everywhere: attention_*_bf16 read float32, to which the caller converts
#define OPKIT_ISA_MEMBER(kernel, parameters) void(*kernel) parameters = nullptr;
    OPKIT_ISA_KERNELS(OPKIT_ISA_MEMBER)
#undef OPKIT_ISA_MEMBER
};

}  // namespace opkit::isa
