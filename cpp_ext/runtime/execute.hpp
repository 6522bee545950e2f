// One call of a kernel, from its arguments to its outputs.
#pragma once

#include "../../opkit/kernels/include/opkit.h"

namespace opkit {

// See opk_runtime.execute in opkit.h. `outputs` receives the caller's handles to the new tensors, and null for outputs
// that are arguments. On OPK_REFUSED nothing was run, and message says why; on OPK_FAILED the kernel, or torch, failed,
// and message says which and how.
int32_t execute(const opk_kernel* kernel, const opk_input* inputs, const int64_t* layout, void** outputs,
                opk_message* message);

// Puts the operator and the kernel before a message.
void name_kernel(const opk_kernel& kernel, opk_message& message);

}  // namespace opkit
