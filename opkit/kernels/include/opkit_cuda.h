/* What host code of CUDA C++ needs where no toolkit is: launches and a few functions of CUDA's runtime, by way of the driver. C++17.
 *
 * It follows opkit.h and opkit_types.h. Kernels were compiled by NVRTC and lie in the same library, an opk_cuda_unit for each
 * translation unit; in place of each the host has a function of the same parameters, which calls opk_launch. Numbers of errors and
 * attributes are those of cuda.h. */
#ifndef OPKIT_CUDA_H
#define OPKIT_CUDA_H

#include <dlfcn.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict __restrict__

/* ---- types -------------------------------------------------------------------------------------------------------- */

typedef struct CUstream_st* cudaStream_t;
enum cudaError_t : int32_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2 };
typedef cudaError_t cudaError;
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrL2CacheSize = 38, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define OPK_VECTORS(TYPE, NAME, OF_TWO, OF_FOUR)                                                                         \
    struct NAME##1 { TYPE x; };                                                                                          \
    struct alignas(OF_TWO) NAME##2 { TYPE x, y; };                                                                       \
    struct NAME##3 { TYPE x, y, z; };                                                                                    \
    struct alignas(OF_FOUR) NAME##4 { TYPE x, y, z, w; };                                                                \
    static inline NAME##1 make_##NAME##1(TYPE x) { return {x}; }                                                         \
    static inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                                              \
    static inline NAME##3 make_##NAME##3(TYPE x, TYPE y, TYPE z) { return {x, y, z}; }                                   \
    static inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
OPK_VECTORS(signed char, char, 2, 4)
OPK_VECTORS(unsigned char, uchar, 2, 4)
OPK_VECTORS(short, short, 4, 8)
OPK_VECTORS(unsigned short, ushort, 4, 8)
OPK_VECTORS(int, int, 8, 16)
OPK_VECTORS(unsigned int, uint, 8, 16)
OPK_VECTORS(long, long, 16, 16)
OPK_VECTORS(unsigned long, ulong, 16, 16)
OPK_VECTORS(long long, longlong, 16, 16)
OPK_VECTORS(unsigned long long, ulonglong, 16, 16)
OPK_VECTORS(float, float, 8, 16)
OPK_VECTORS(double, double, 16, 16)
#undef OPK_VECTORS
typedef float2 cuFloatComplex;
typedef float2 cuComplex;
typedef double2 cuDoubleComplex;

typedef opk_half __half;
typedef opk_half half;
typedef opk_bf16 __nv_bfloat16;
typedef opk_bf16 nv_bfloat16;
struct alignas(4) __half2 { __half x, y; };
typedef __half2 half2;
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __nv_bfloat162 nv_bfloat162;

/* ---- the driver --------------------------------------------------------------------------------------------------- */

/* What NVRTC made for a compute capability, 90 for 9.0. `reach`: it runs on others of its major version that are newer (0), on all
 * newer ones, as it is PTX (1), or on no others (2). */
struct opk_cuda_image {
    int32_t capability, reach;
    const void* content;
};
struct opk_cuda_unit {
    const opk_cuda_image* images;
    int32_t image_count;
    void** libraries;         /* of each image, once it is loaded */
    const char* const* names; /* of kernels, by number */
};
extern "C" __attribute__((visibility("hidden"))) const opk_cuda_unit OPK_CUDA_UNIT;

namespace opk_cuda {
namespace { /* each unit has its own kernels */

/* The driver's functions; cudaErrorInsufficientDriver (35) where there is none. */
inline void* function(const char* name) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr : dlsym(library, name);
}
template <class... P>
int32_t call(int32_t (*function)(P...), P... arguments) { return function == nullptr ? 35 : function(arguments...); }
#define OPK_DRIVER(NAME, SYMBOL, ...)                                                                                     \
    template <class... A>                                                                                                \
    int32_t NAME(A... arguments) {                                                                                       \
        static const auto found = reinterpret_cast<int32_t (*)(__VA_ARGS__)>(function(SYMBOL));                          \
        return call<__VA_ARGS__>(found, arguments...);                                                                   \
    }
OPK_DRIVER(initialize, "cuInit", uint32_t)
OPK_DRIVER(get_context, "cuCtxGetCurrent", void**)
OPK_DRIVER(set_context, "cuCtxSetCurrent", void*)
OPK_DRIVER(retain_context, "cuDevicePrimaryCtxRetain", void**, int32_t)
OPK_DRIVER(get_device, "cuCtxGetDevice", int32_t*)
OPK_DRIVER(device_attribute, "cuDeviceGetAttribute", int32_t*, int32_t, int32_t)
OPK_DRIVER(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", int32_t*)
OPK_DRIVER(load_library, "cuLibraryLoadData", void**, const void*, void*, void*, uint32_t, void*, void*, uint32_t)
OPK_DRIVER(unload_library, "cuLibraryUnload", void*)
OPK_DRIVER(get_kernel, "cuLibraryGetKernel", void**, void*, const char*)
OPK_DRIVER(set_kernel_attribute, "cuKernelSetAttribute", int32_t, int32_t, void*, int32_t)
OPK_DRIVER(launch, "cuLaunchKernel", void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**, void**)
OPK_DRIVER(error_string, "cuGetErrorString", int32_t, const char**)
OPK_DRIVER(error_name, "cuGetErrorName", int32_t, const char**)
OPK_DRIVER(fill, "cuMemsetD8Async", uint64_t, uint8_t, size_t, void*)
OPK_DRIVER(copy, "cuMemcpyAsync", uint64_t, uint64_t, size_t, void*)
OPK_DRIVER(allocate, "cuMemAllocAsync", void**, size_t, void*)
OPK_DRIVER(release, "cuMemFreeAsync", void*, void*)
OPK_DRIVER(await_stream, "cuStreamSynchronize", void*)
#undef OPK_DRIVER

inline int32_t& last_error() {
    static thread_local int32_t error = 0;
    return error;
}
inline cudaError_t noted(int32_t error) {
    if (error != 0) last_error() = error;
    return static_cast<cudaError_t>(error);
}

/* The device whose context is current; a thread that has none gets that of the first device, as from CUDA's runtime. */
inline int32_t current_device(int32_t* device) {
    void* context = nullptr;
    int32_t error = get_context(&context);
    if (error == 3) error = initialize(0u); /* not initialized */
    if (error == 0 && context == nullptr) {
        if ((error = retain_context(&context, 0)) == 0) error = set_context(context);
    }
    return error != 0 ? error : get_device(device);
}

/* The best image for a device: its own code, else that of an older one of its kind, else PTX. -1: there is none. */
inline int32_t image_for(int32_t device) {
    int32_t major = 0, minor = 0, chosen = -1, best = -1;
    if (device_attribute(&major, cudaDevAttrComputeCapabilityMajor, device) != 0) return -1;
    if (device_attribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != 0) return -1;
    for (int32_t i = 0; i < OPK_CUDA_UNIT.image_count; i++) {
        const opk_cuda_image& image = OPK_CUDA_UNIT.images[i];
        const int32_t newer = 10 * major + minor - image.capability;
        const bool fits = image.reach == 2 || newer < 0 ? newer == 0 : image.reach == 1 || image.capability / 10 == major;
        const int32_t worth = image.capability + (image.reach == 1 ? 0 : 1000);
        if (fits && worth > best) chosen = i, best = worth;
    }
    return chosen;
}

inline int32_t load(int32_t image, void** library) {
    *library = __atomic_load_n(&OPK_CUDA_UNIT.libraries[image], __ATOMIC_ACQUIRE);
    if (*library != nullptr) return 0;
    int32_t mode = 2; /* relaxed: a stream of this thread may be being captured */
    exchange_capture_mode(&mode);
    void *made = nullptr, *nothing = nullptr;
    const int32_t error = load_library(&made, OPK_CUDA_UNIT.images[image].content, nothing, nothing, 0u, nothing, nothing, 0u);
    exchange_capture_mode(&mode);
    if (error != 0) return error;
    if (__atomic_compare_exchange_n(&OPK_CUDA_UNIT.libraries[image], library, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        *library = made;
    else
        unload_library(made); /* another thread came first */
    return 0;
}

inline int32_t kernel(int32_t number, void** found, int32_t* device) {
    if (const int32_t error = current_device(device)) return error;
    const int32_t image = image_for(*device);
    if (image < 0) return 209; /* no binary for this GPU */
    void* library = nullptr;
    if (const int32_t error = load(image, &library)) return error;
    return get_kernel(found, library, OPK_CUDA_UNIT.names[number]);
}

struct Pending {
    int32_t number;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
inline Pending& pending() {
    static thread_local Pending launch{};
    return launch;
}

}  // namespace
}  // namespace opk_cuda

static inline void opk_configure(int32_t number, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr) {
    opk_cuda::pending() = {number, grid, block, shared, stream};
}

static inline void opk_launch(void** arguments) {
    const opk_cuda::Pending& given = opk_cuda::pending();
    void* kernel = nullptr;
    int32_t device = 0, error = opk_cuda::kernel(given.number, &kernel, &device);
    void** const none = nullptr;
    if (error == 0)
        error = opk_cuda::launch(kernel, given.grid.x, given.grid.y, given.grid.z, given.block.x, given.block.y, given.block.z,
                                 static_cast<uint32_t>(given.shared), given.stream, arguments, none);
    opk_cuda::noted(error);
}

static inline cudaError_t opk_set_attribute(int32_t number, cudaFuncAttribute attribute, int value) {
    void* kernel = nullptr;
    int32_t device = 0, error = opk_cuda::kernel(number, &kernel, &device);
    if (error == 0) error = opk_cuda::set_kernel_attribute(int32_t{attribute}, value, kernel, device);
    return opk_cuda::noted(error);
}

/* ---- of CUDA's runtime -------------------------------------------------------------------------------------------- */

static inline cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(opk_cuda::last_error()); }
static inline cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    opk_cuda::last_error() = 0;
    return error;
}
static inline const char* cudaGetErrorString(cudaError_t error) {
    const char* text = nullptr;
    if (opk_cuda::error_string(int32_t{error}, &text) != 0 || text == nullptr) text = "the GPU's driver cannot be used";
    return text;
}
static inline const char* cudaGetErrorName(cudaError_t error) {
    const char* text = nullptr;
    if (opk_cuda::error_name(int32_t{error}, &text) != 0 || text == nullptr) text = "an error without a name";
    return text;
}
static inline cudaError_t cudaGetDevice(int* device) { return opk_cuda::noted(opk_cuda::current_device(device)); }
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return opk_cuda::noted(opk_cuda::device_attribute(value, int32_t{attribute}, device));
}
static inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream = nullptr) {
    return opk_cuda::noted(opk_cuda::fill(reinterpret_cast<uint64_t>(memory), static_cast<uint8_t>(value), bytes, stream));
}
static inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream = nullptr) {
    return opk_cuda::noted(opk_cuda::copy(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream));
}
template <class E>
static inline cudaError_t cudaMallocAsync(E** memory, size_t bytes, cudaStream_t stream) {
    return opk_cuda::noted(opk_cuda::allocate(reinterpret_cast<void**>(memory), bytes, stream));
}
static inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
    return opk_cuda::noted(opk_cuda::release(memory, stream));
}
static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return opk_cuda::noted(opk_cuda::await_stream(stream)); }

#endif
