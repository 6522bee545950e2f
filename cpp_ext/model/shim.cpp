// The functions that the runtime of kernels (runtime/) calls of torch, for programs without torch. A handle is a Tensor*.
#include "../runtime/shim.hpp"

#include <stdexcept>

#include "tensor.hpp"
#include "threads.hpp"

namespace opkit {
namespace {

using model::Tensor;

Tensor& of(Handle handle) { return *static_cast<Tensor*>(handle); }

// Of torch's C functions: 0, or 1 where something was thrown.
template <class F>
int32_t guarded(const F& work) {
    try {
        work();
        return 0;
    } catch (...) {
        return 1;
    }
}

int32_t empty_strided(int64_t rank, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t, int32_t,
                      Handle* made) {
    return guarded([&] { *made = new Tensor(Tensor::empty({nullptr, sizes, strides, rank, dtype, -1})); });
}

template <class Pointer>
int32_t data(Handle handle, Pointer* found) {
    *found = of(handle).data;
    return 0;
}

template <class Number, Number value>
int32_t constant(Handle, Number* found) {
    *found = value;
    return 0;
}

}  // namespace

Shim find_shim() {
    Shim found;
    found.aoti_torch_get_dtype = [](Handle handle, int32_t* dtype) { return *dtype = of(handle).dtype, 0; };
    found.aoti_torch_get_device_type = constant<int32_t, 0>;
    found.aoti_torch_get_device_index = constant<int32_t, -1>;
    found.aoti_torch_get_layout = constant<int32_t, 0>;
    found.aoti_torch_get_dim = [](Handle handle, int64_t* rank) {
        return *rank = static_cast<int64_t>(of(handle).sizes.size()), 0;
    };
    found.aoti_torch_get_sizes = [](Handle handle, int64_t** sizes) { return *sizes = of(handle).sizes.data(), 0; };
    found.aoti_torch_get_strides = [](Handle handle, int64_t** strides) { return *strides = of(handle).strides.data(), 0; };
    found.aoti_torch_is_defined = [](Handle, bool* is) { return *is = true, 0; };
    found.torch_get_const_data_ptr = data<const void*>;
    found.torch_get_mutable_data_ptr = data<void*>;
    found.aoti_torch_empty_strided = empty_strided;
    found.aoti_torch_copy_ = [](Handle to, Handle from, int32_t) {
        return guarded([&] { model::copy(of(from).described(), of(to).described()); });
    };
    found.aoti_torch_new_tensor_handle = [](Handle handle, Handle* made) {
        return guarded([&] { *made = new Tensor(of(handle)); });
    };
    found.aoti_torch_delete_tensor_object = [](Handle handle) { return delete static_cast<Tensor*>(handle), 0; };
    found.torch_parallel_for = [](int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                  void* context) {
        return guarded([&] { model::for_range(begin, end, grain, body, context); });
    };
    found.torch_get_num_threads = [](uint32_t* count) { return *count = static_cast<uint32_t>(model::threads().count), 0; };
    found.torch_get_thread_idx = [](uint32_t* number) {
        return *number = static_cast<uint32_t>(model::threads().number()), 0;
    };
    return found;
}

const Shim& cuda_shim() { throw std::runtime_error("opkit: a kernel for GPUs needs torch"); }

}  // namespace opkit
