// One tensor of a call, read once through the shim.
#pragma once

#include "../../opkit/kernels/include/opkit.h"
#include "shim.hpp"

namespace opkit {

struct View {
    Handle handle = nullptr;  // null: None
    const int64_t* sizes;
    const int64_t* strides;
    int64_t rank;
    int32_t dtype;
    int32_t device_type;
    bool contiguous;

    int64_t numel() const;
};

// Reads what `handle` says of itself; false if torch refused or the tensor is undefined.
bool read(Handle handle, View& view);

// The view of a tensor of which all but the device type is known.
void show(const opk_tensor& known, Handle handle, View& view);

// Whether these are the strides of a row-major tensor, sizes of one and empty tensors aside.
bool row_major(const int64_t* sizes, const int64_t* strides, int64_t rank);

// What torch calls an opk_dtype.
const char* dtype_name(int32_t dtype);

int64_t element_count(const int64_t* sizes, int64_t count);

}  // namespace opkit
