// Of CUDA C++ and its libraries what the kernels for sm_90a use, on the machine of machine.hpp.
#pragma once

#include "machine.hpp"

#define __device__
#define __host__
#define __forceinline__ inline
#define __global__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct Coordinate {
    unsigned (*ask)();
    operator unsigned() const { return ask(); }
};
struct Coordinates {
    Coordinate x, y, z;
};
#define COORDINATES(of) {{[] { return machine::of.x; }}, {[] { return machine::of.y; }}, {[] { return machine::of.z; }}}
static const Coordinates threadIdx = COORDINATES(self().thread), blockIdx = COORDINATES(self().block->index);
static const Coordinates gridDim = COORDINATES(here().grid);

// ---- CUDA C++ -----------------------------------------------------------------------------------------------------------------

struct uint4 {
    uint32_t x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct int2 {
    int x, y;
};
struct uint2 {
    uint32_t x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename A, typename B>
static inline auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B>
static inline auto max(A a, B b) { return a > b ? a : b; }

struct __nv_bfloat16 {
    uint16_t bits = 0;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) {
        uint32_t all;
        std::memcpy(&all, &x, 4);
        bits = x != x ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
    }
    explicit operator float() const {
        const uint32_t all = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &all, 4);
        return x;
    }
};
using __half = _Float16;

template <typename V>
static inline V __shfl_xor_sync(unsigned, V value, int bits) { return machine::exchange(value)[(threadIdx.x % 32) ^ bits]; }
template <typename V>
static inline V __shfl_sync(unsigned, V value, int lane) { return machine::exchange(value)[lane]; }
static inline unsigned __ballot_sync(unsigned, bool value) {
    const auto all = machine::exchange(int(value));
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= unsigned(all[i]) << i;
    return bits;
}
static inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
static inline bool __all_sync(unsigned, bool value) {
    const auto all = machine::exchange(int(value));
    return std::all_of(all.begin(), all.end(), [](int each) { return each; });
}
static inline bool __any_sync(unsigned all, bool value) { return !__all_sync(all, !value); }
static inline float __fmul_rn(float x, float y) {
    volatile float product = x * y;  // so that it is not fused with what follows
    return product;
}
static inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline void __syncwarp() { machine::meet_warp(); }
static inline void __syncthreads() { machine::meet_named(0, machine::self().block->threads); }
static inline void __threadfence() {}
static inline int atomicAdd(int* at, int x) {
    const int before = *at;
    *at += x;
    return before;
}

// ---- the host ------------------------------------------------------------------------------------------------------------------

static inline float __int_as_float(int bits) { return __uint_as_float(bits); }

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = uintptr_t;  // the seed of an order of events
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorSymbolNotFound = 500, cudaErrorLaunchFailure = 719 };
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
constexpr int cudaEnableDefault = 0;

// A tensor of elements of some bytes, the innermost dimension first, and the boxes that are copied of it.
struct CUtensorMap {
    const unsigned char* data;
    int rank, element;
    int64_t sizes[5], strides[5];  // strides in bytes
    int box[5];
};

static inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                              const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                              const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle,
                                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    *map = {static_cast<const unsigned char*>(data), int(rank), element, {1, 1, 1, 1, 1}, {}, {1, 1, 1, 1, 1}};
    bool fits = rank <= 5 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * element <= 128;
    for (cuuint32_t i = 0; i < rank; i++) {
        map->sizes[i] = sizes[i], map->box[i] = box[i], map->strides[i] = i ? strides[i - 1] : element;
        fits &= sizes[i] > 0 && sizes[i] <= uint64_t(1) << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
        fits &= i == 0 || (strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t(1) << 40);
    }
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int,
                                                           cudaDriverEntryPointQueryResult*) {
    *function = reinterpret_cast<void*>(cuTensorMapEncodeTiled);
    return cudaSuccess;
}
static inline cudaError_t cudaGetDevice(int* device) {
    *device = -1;
    return cudaSuccess;
}
static inline cudaError_t cudaSetDevice(int) { return cudaErrorInvalidValue; }
template <typename K>
static inline cudaError_t cudaFuncSetAttribute(K, cudaFuncAttribute, int bytes) {
    return bytes <= int(machine::SHARED) ? cudaSuccess : cudaErrorInvalidValue;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = 0;
    cudaLaunchAttribute* attrs = nullptr;
    unsigned numAttrs = 0;
};
template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... arguments) {
    const unsigned grid[] = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
    try {
        machine::run(grid, config->blockDim.x, unsigned(config->stream), [&] { kernel(arguments...); });
        return cudaSuccess;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return cudaErrorLaunchFailure;
    }
}
