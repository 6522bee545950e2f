// torch's C shim, found in the libtorch that the process has loaded. No torch header is included, so one build of this
// serves every torch from 2.11 on. The functions are declared in torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h; all return 0 unless they failed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace opkit {

using Handle = void*;  // an AtenTensorHandle, a StableListHandle, ...
using BoxedKernel = void (*)(uint64_t*, uint64_t, uint64_t);

constexpr uint64_t kTorchVersion = (uint64_t{2} << 56) | (uint64_t{11} << 48);  // whose layout of the stack we speak

// name, parameters; in libtorch_cpu
#define OPKIT_SHIM(X)                                                                                                  \
    X(aoti_torch_get_dtype, (Handle, int32_t*))                                                                        \
    X(aoti_torch_get_device_type, (Handle, int32_t*))                                                                  \
    X(aoti_torch_get_device_index, (Handle, int32_t*))                                                                 \
    X(aoti_torch_get_layout, (Handle, int32_t*))                                                                       \
    X(aoti_torch_get_dim, (Handle, int64_t*))                                                                          \
    X(aoti_torch_get_sizes, (Handle, int64_t**))                                                                       \
    X(aoti_torch_get_strides, (Handle, int64_t**))                                                                     \
    X(aoti_torch_is_defined, (Handle, bool*))                                                                          \
    X(torch_get_const_data_ptr, (Handle, const void**))                                                                \
    X(torch_get_mutable_data_ptr, (Handle, void**))                                                                    \
    X(aoti_torch_empty_strided, (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*))         \
    X(aoti_torch_copy_, (Handle, Handle, int32_t))                                                                     \
    X(aoti_torch_new_tensor_handle, (Handle, Handle*))                                                                 \
    X(aoti_torch_delete_tensor_object, (Handle))                                                                       \
    X(torch_list_size, (Handle, size_t*))                                                                              \
    X(torch_list_get_item, (Handle, size_t, uint64_t*))                                                                \
    X(torch_delete_list, (Handle))                                                                                     \
    X(torch_string_length, (Handle, size_t*))                                                                          \
    X(torch_string_c_str, (Handle, const char**))                                                                      \
    X(torch_delete_string, (Handle))                                                                                   \
    X(aoti_torch_cpu_mm_out, (Handle, Handle, Handle))                                                                 \
    X(aoti_torch_cpu_bmm_out, (Handle, Handle, Handle))                                                                \
    X(torch_parallel_for, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*))                       \
    X(torch_get_num_threads, (uint32_t*))                                                                              \
    X(torch_get_thread_idx, (uint32_t*))                                                                               \
    X(aoti_torch_library_init_impl, (const char*, const char*, const char*, uint32_t, Handle*))                        \
    X(aoti_torch_library_init_fragment, (const char*, const char*, uint32_t, Handle*))                                 \
    X(aoti_torch_library_def, (Handle, const char*))                                                                   \
    X(torch_library_impl, (Handle, const char*, BoxedKernel, uint64_t))                                                \
    X(aoti_torch_delete_library_object, (Handle))

// in libtorch_cuda
#define OPKIT_CUDA_SHIM(X)                                                                                             \
    X(aoti_torch_create_cuda_guard, (int32_t, Handle*))                                                                \
    X(aoti_torch_delete_cuda_guard, (Handle))                                                                          \
    X(aoti_torch_get_current_cuda_stream, (int32_t, void**))

struct Shim {
#define OPKIT_DECLARE(name, parameters) int32_t(*name) parameters = nullptr;
    OPKIT_SHIM(OPKIT_DECLARE)
    OPKIT_CUDA_SHIM(OPKIT_DECLARE)
#undef OPKIT_DECLARE
    // Null before torch 2.13:
    int32_t (*torch_delete_stable_ivalue)(uint64_t*) = nullptr;  // a cell was what operator new gave
    const char* (*torch_exception_get_what_without_backtrace)() = nullptr;  // of this thread's last failure
};

Shim find_shim();

// The functions of the loaded libtorch. Throws std::runtime_error, naming what is missing, where there is none.
inline const Shim& shim() {
    static const Shim found = find_shim();
    return found;
}

// The same with the CUDA functions.
const Shim& cuda_shim();

}  // namespace opkit
