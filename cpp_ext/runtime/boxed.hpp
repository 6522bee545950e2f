// A kernel as torch's dispatcher calls it through the C shim: arguments and results on a stack of 64-bit words.
#pragma once

#include "../../opkit/kernels/include/opkit.h"

namespace opkit {

// The layout of the words is that of torch/csrc/stable/stableivalue_conversions.h. Everything on the stack is ours to
// release. With has_layout there is one argument more than the kernel has: `int[]? opk_layout`.
// Throws std::runtime_error where the kernel refuses the call or fails; nothing is leaked then.
void boxed(const opk_kernel* kernel, uint64_t* stack, uint64_t inputs, uint64_t outputs, int32_t has_layout);

}  // namespace opkit
