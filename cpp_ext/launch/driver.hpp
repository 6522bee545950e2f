// The GPU's driver, found by dlopen: CUDA's or HIP's under one set of names. No header of theirs is included and nothing
// of theirs is linked to. Types and numbers as in cuda.h 13.0 and hip_runtime_api.h 7.0.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace opkit::launch {

using Extent = std::array<int64_t, 3>;  // of a grid, or of a cluster

struct LaunchAttribute {
    uint32_t id;
    char padding[4];
    uint32_t value[16];
};

struct LaunchConfig {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    void* stream;
    LaunchAttribute* attributes;
    uint32_t attribute_count;
};

enum : uint32_t {  // of LaunchAttribute; HIP has the first two
    kCooperative = 2,
    kClusterDimension = 4,
    kClusterScheduling = 5,
    kProgrammaticStreamSerialization = 6
};
enum : int32_t {  // of functions, in CUDA and in HIP
    kMaxThreads = 0,
    kSharedBytes = 1,
    kLocalBytes = 3,
    kRegisters = 4,
    kMaxDynamicShared = 8,
    kNonPortableCluster = 14  // CUDA's alone
};
constexpr int32_t kMaxSharedOptIn = 97;  // of CUDA's devices
constexpr int32_t kRelaxedCapture = 2, kPreferShared = 1, kSpreadClusters = 1;

// name here, in CUDA, in HIP ("": it has none), whether the library must have it, parameters
#define OPKIT_DRIVER(X)                                                                                              \
    X(initialize, "cuInit", "hipInit", true, (uint32_t))                                                             \
    X(version, "cuDriverGetVersion", "hipDriverGetVersion", true, (int32_t*))                                        \
    X(error_name, "cuGetErrorName", "hipDrvGetErrorName", true, (int32_t, const char**))                             \
    X(error_text, "cuGetErrorString", "hipDrvGetErrorString", true, (int32_t, const char**))                         \
    X(get_device, "", "hipGetDevice", true, (int32_t*))                                                              \
    X(set_device, "", "hipSetDevice", true, (int32_t))                                                               \
    X(find_device, "cuDeviceGet", "", true, (int32_t*, int32_t))                                                     \
    X(device_attribute, "cuDeviceGetAttribute", "", true, (int32_t*, int32_t, int32_t))                              \
    X(retain_context, "cuDevicePrimaryCtxRetain", "", true, (void**, int32_t))                                       \
    X(get_context, "cuCtxGetCurrent", "", true, (void**))                                                            \
    X(set_context, "cuCtxSetCurrent", "", true, (void*))                                                             \
    X(load_module, "cuModuleLoadData", "hipModuleLoadData", true, (void**, const void*))                             \
    X(unload_module, "cuModuleUnload", "hipModuleUnload", true, (void*))                                             \
    X(find_function, "cuModuleGetFunction", "hipModuleGetFunction", true, (void**, void*, const char*))              \
    X(function_attribute, "cuFuncGetAttribute", "hipFuncGetAttribute", true, (int32_t*, int32_t, void*))             \
    X(set_function_attribute, "cuFuncSetAttribute", "", true, (void*, int32_t, int32_t))                             \
    X(set_cache_preference, "cuFuncSetCacheConfig", "", true, (void*, int32_t))                                      \
    X(parameter_info, "cuFuncGetParamInfo", "", false, (void*, size_t, size_t*, size_t*))                            \
    X(launch, "cuLaunchKernel", "hipModuleLaunchKernel", true,                                                       \
      (void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**, void**))          \
    X(launch_extended, "cuLaunchKernelEx", "hipDrvLaunchKernelEx", false,                                            \
      (const LaunchConfig*, void*, void**, void**))                                                                  \
    X(launch_cooperative, "cuLaunchCooperativeKernel", "hipModuleLaunchCooperativeKernel", false,                    \
      (void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**))                  \
    X(encode_map, "cuTensorMapEncodeTiled", "", false,                                                               \
      (void*, int32_t, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int32_t, \
       int32_t, int32_t, int32_t))                                                                                   \
    X(replace_address, "cuTensorMapReplaceAddress", "", false, (void*, void*))                                       \
    X(fill, "cuMemsetD8Async", "hipMemsetD8Async", true, (uint64_t, uint8_t, size_t, void*))                         \
    X(copy, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", true, (uint64_t, uint64_t, size_t, void*))                 \
    X(make_event, "cuEventCreate", "hipEventCreateWithFlags", true, (void**, uint32_t))                              \
    X(destroy_event, "cuEventDestroy_v2", "hipEventDestroy", true, (void*))                                          \
    X(record_event, "cuEventRecord", "hipEventRecord", true, (void*, void*))                                         \
    X(await_event, "cuEventSynchronize", "hipEventSynchronize", true, (void*))                                       \
    X(elapsed, "cuEventElapsedTime", "hipEventElapsedTime", true, (float*, void*, void*))                            \
    X(capturing, "cuStreamIsCapturing", "hipStreamIsCapturing", true, (void*, int32_t*))                             \
    X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode", true,        \
      (int32_t*))

template <class Signature>
struct Function {
    Signature* pointer = nullptr;  // null: this library has it not
    const char* name = "";
};

class Driver {
public:
    // `kind` is "cuda" or "hip". Throws std::runtime_error where the library cannot be opened, or lacks a function.
    Driver(const std::string& path, const std::string& kind);

    // Calls a function of the driver. Throws std::runtime_error, with its name and the error's, where it fails.
    template <class... Parameters, class... Arguments>
    void operator()(const Function<int32_t(Parameters...)>& function, Arguments... arguments) const {
        if (function.pointer == nullptr) lacks(function.name);
        if (const int32_t error = function.pointer(arguments...)) fail(function.name, error);
    }

    bool hip() const { return hip_; }
    int32_t loaded_version() const;  // 13010: 13.1

    // Makes sure that this thread has a context: that of the device, unless it has one.
    void enter(int32_t device) const {
        static thread_local const Driver* entered = nullptr;
        if (entered == this) return;
        if (!hip_) require_context(device);
        entered = this;
    }

    // Whether work on the stream is being captured by any driver that this process uses.
    static bool is_captured(void* stream);

#define OPKIT_DECLARE(member, cuda, hip, needed, parameters) Function<int32_t parameters> member;
    OPKIT_DRIVER(OPKIT_DECLARE)
#undef OPKIT_DECLARE

private:
    void require_context(int32_t device) const;
    [[noreturn]] void fail(const char* function, int32_t error) const;
    [[noreturn]] void lacks(const char* function) const;

    std::string path_;
    bool hip_;
};

// While it lives, the primary context of a device is current in this thread, and the thread may do things that a
// capture of a stream otherwise forbids: load a module, say.
class Loading {
public:
    Loading(const Driver& driver, int32_t device);
    ~Loading();
    Loading(const Loading&) = delete;
    Loading& operator=(const Loading&) = delete;

private:
    const Driver& driver_;
    void* context_ = nullptr;  // that was current
    int32_t device_ = 0;       // likewise, in HIP
    int32_t mode_ = kRelaxedCapture;
};

}  // namespace opkit::launch
