// Tensors of programs without torch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../../opkit/kernels/include/opkit.h"

namespace opkit::model {

using Memory = std::shared_ptr<void>;

// Bytes aligned to 64. Throws std::bad_alloc.
Memory allocate(int64_t bytes);

int64_t item_size(int32_t dtype);  // 0: an unknown dtype

// Elements of a layout, from the first to the last place in memory. Throws std::runtime_error where that overflows.
int64_t span(const int64_t* sizes, const int64_t* strides, int64_t rank);

bool same_layout(const opk_tensor& tensor, const int64_t* strides);  // where there is more than one element to a dimension

std::string describe(int32_t dtype, const int64_t* sizes, int64_t rank);  // "float32[3, 4]"

// What the runtime of kernels takes for one of torch's tensors: a handle points at one.
struct Tensor {
    std::vector<int64_t> sizes, strides;
    int32_t dtype = OPK_FLOAT32;
    int32_t device = -1;  // of a GPU: its number
    void* data = nullptr;
    Memory memory;  // null: somebody else's

    // A new one, of any contents.
    static Tensor empty(const opk_tensor& layout);
    static Tensor view(const opk_tensor& of);
    opk_tensor described() const;
};

// Copies elements between layouts of the same sizes and dtype.
void copy(const opk_tensor& from, const opk_tensor& to);

}  // namespace opkit::model
