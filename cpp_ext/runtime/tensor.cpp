#include "tensor.hpp"

namespace opkit {

int64_t element_count(const int64_t* sizes, int64_t count) {
    int64_t result = 1;
    for (int64_t i = 0; i < count; i++) result *= sizes[i];
    return result;
}

const char* dtype_name(int32_t dtype) {
    static constexpr struct {
        int32_t dtype;
        const char* name;
    } kNames[] = {
        {OPK_UINT8, "uint8"},         {OPK_INT8, "int8"},         {OPK_INT16, "int16"},       {OPK_INT32, "int32"},
        {OPK_INT64, "int64"},         {OPK_FLOAT16, "float16"},   {OPK_FLOAT32, "float32"},   {OPK_FLOAT64, "float64"},
        {OPK_COMPLEX64, "complex64"}, {OPK_COMPLEX128, "complex128"}, {OPK_BOOL, "bool"},     {OPK_BFLOAT16, "bfloat16"},
        {OPK_UINT16, "uint16"},       {OPK_UINT32, "uint32"},     {OPK_UINT64, "uint64"},
    };
    for (const auto& row : kNames)
        if (row.dtype == dtype) return row.name;
    return "unknown";
}

int64_t View::numel() const { return element_count(sizes, rank); }

bool row_major(const int64_t* sizes, const int64_t* strides, int64_t rank) {
    bool fits = true;
    int64_t expected = 1;
    for (int64_t i = rank; i-- > 0;) {
        if (sizes[i] == 0) return true;
        if (sizes[i] != 1 && strides[i] != expected) fits = false;
        expected *= sizes[i];
    }
    return fits;
}

bool read(Handle handle, View& view) {
    const Shim& torch = shim();
    view.handle = handle;
    int64_t *sizes, *strides;
    if (torch.aoti_torch_get_dim(handle, &view.rank) || torch.aoti_torch_get_sizes(handle, &sizes) ||
        torch.aoti_torch_get_strides(handle, &strides) || torch.aoti_torch_get_dtype(handle, &view.dtype) ||
        torch.aoti_torch_get_device_type(handle, &view.device_type))
        return false;
    view.sizes = sizes;
    view.strides = strides;
    view.contiguous = row_major(sizes, strides, view.rank);
    return true;
}

void show(const opk_tensor& known, Handle handle, View& view) {
    view.handle = handle;
    view.sizes = known.sizes;
    view.strides = known.strides;
    view.rank = known.rank;
    view.dtype = known.dtype;
    view.contiguous = row_major(known.sizes, known.strides, known.rank);
}

}  // namespace opkit
