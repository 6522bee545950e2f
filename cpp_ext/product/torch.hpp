// Products in place of torch's, for compiled graphs.
#pragma once

#include "../isa/table.hpp"
#include "../runtime/shim.hpp"
#include "product.hpp"

namespace opkit::product {

// Torch's threads.
Parallel torch_threads();

// With the signatures of aoti_torch_cpu_mm_out and aoti_torch_cpu_bmm_out: out, left, right; other than 0 if torch failed.
struct Functions {
    int32_t (*mm)(Handle, Handle, Handle);
    int32_t (*bmm)(Handle, Handle, Handle);
};

// Those kernels serve all products from now on.
Functions functions(const isa::Table& kernels);

}  // namespace opkit::product
