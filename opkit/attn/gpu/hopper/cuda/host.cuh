// What launches have in common: maps for TMA, and the device on which they are made.
#pragma once

#include <type_traits>

#include "tensors.cuh"

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode() {
    static const Encode found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<Encode>(function);
    }();
    return found;
}

template <typename E>
constexpr CUtensorMapDataType type_of() {
    if (sizeof(E) == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    return std::is_same<E, __half>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// How TMA finds some rows of a head, in boxes of 128 bytes; what is not there are zeros.
template <typename E = T>
cudaError_t describe(CUtensorMap* map, const Rows& x, int batch, int heads, int length, int columns, int rows, int boxes) {
    constexpr int WIDTH = ROW_BYTES / sizeof(E);
    const auto bytes = [](int64_t elements) { return cuuint64_t(elements) * sizeof(E); };
    const cuuint64_t sizes[] = {cuuint64_t(min(columns, WIDTH)), cuuint64_t(length), cuuint64_t(max(columns / WIDTH, 1)),
                                cuuint64_t(heads), cuuint64_t(batch)};
    const cuuint64_t strides[] = {bytes(x.row), ROW_BYTES, bytes(x.head), bytes(x.batch)};
    const cuuint32_t box[] = {WIDTH, cuuint32_t(rows), cuuint32_t(boxes), 1, 1}, ones[] = {1, 1, 1, 1, 1};
    if (encode() == nullptr) return cudaErrorSymbolNotFound;
    const CUresult result = encode()(map, type_of<E>(), 5, x.data, sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaLaunchConfig_t configured(dim3 grid, int threads, int shared_bytes, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return config;
}

// A launch that may begin before the one before it has ended; its kernel says what has to wait for that.
template <typename... P, typename... A>
cudaError_t launch_early(cudaLaunchConfig_t config, void (*kernel)(P...), const A&... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// A device is the current one for a while.
struct OnDevice {
    explicit OnDevice(int device) {
        error = cudaGetDevice(&before);
        if (!error && before != device) error = cudaSetDevice(device), changed = !error;
    }
    ~OnDevice() {
        if (changed) cudaSetDevice(before);
    }
    cudaError_t error;
    int before = 0;
    bool changed = false;
};

}  // namespace
