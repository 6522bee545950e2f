// The backward on the host. Who includes this file names the elements T, and may say that steps are listed, or sums made in order.
#include "backward.cuh"
#include "host.cuh"

#ifndef STEPS_LISTED
#define STEPS_LISTED false
#endif
#ifndef SUMS_ORDERED
#define SUMS_ORDERED false
#endif

namespace {

template <class S>
cudaError_t launch(Problem problem, cudaStream_t stream) {
    const Problem& call = problem;
    Maps maps;
    const auto described = [&](CUtensorMap* map, const Rows& x, int heads, int length, int columns, int rows, int boxes) {
        return describe(map, x, call.batch, heads, length, columns, rows, boxes);
    };
    const int heads = call.heads, queries = call.queries, keys = call.keys;
    cudaError_t error = described(&maps.q, call.q, heads, queries, call.head_size, S::ROWS, S::BOXES);
    if (!error) error = described(&maps.k, call.k, call.key_heads, keys, call.head_size, KEYS, S::BOXES);
    if (!error) error = described(&maps.v, call.v, call.key_heads, keys, call.value_size, KEYS, S::BOXES);
    if (!error) error = described(&maps.gradient, call.gradient, heads, queries, call.value_size, S::ROWS, S::BOXES);
    if (!error) error = described(&maps.half_of_out, call.out, heads, queries, call.value_size, S::ROWS / 2, S::BOXES);
    if (!error) error = described(&maps.half_of_gradient, call.gradient, heads, queries, call.value_size, S::ROWS / 2, S::BOXES);
    if (!error) error = described(&maps.part_of_q, call.of_q, heads, queries, call.head_size, HALF, 1);
    if (!error) error = cudaFuncSetAttribute(gradients<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error) return error;
    problem.tiles = (keys + KEYS - 1) / KEYS * call.key_heads * call.batch;
    cudaLaunchConfig_t config = configured(dim3((queries + S::ROWS - 1) / S::ROWS, call.prepared), ROW_THREADS, 0, stream);
    error = cudaLaunchKernelEx(&config, before<S>, problem);
    if (error) return error;
    config = configured(dim3(min(call.tiles, call.processors)), THREADS, S::SHARED, stream);
    return cudaLaunchKernelEx(&config, gradients<S>, problem, maps);
}

template <int D>
cudaError_t launch_for(const Problem& call, cudaStream_t stream) {
    constexpr bool ORDERED = SUMS_ORDERED;
    if constexpr (STEPS_LISTED) return launch<Shape<D, true, true, ORDERED>>(call, stream);
    else return call.banded ? launch<Shape<D, true, false, ORDERED>>(call, stream) : launch<Shape<D, false, false, ORDERED>>(call, stream);
}

}  // namespace

// Launch the two kernels; an error of CUDA's, or 0.
extern "C" __attribute__((visibility("default"))) int hopper_backward(const Problem* call, cudaStream_t stream) {
    const OnDevice device(call->device);
    if (device.error) return device.error;
    const bool narrow = call->head_size <= 64 && call->value_size <= 64;
    return narrow ? launch_for<64>(*call, stream) : launch_for<128>(*call, stream);
}

// What opkit's tests hold its own description of a call against, and what a block asks for of shared memory.
extern "C" __attribute__((visibility("default"))) int hopper_backward_call_bytes() { return sizeof(Problem); }
extern "C" __attribute__((visibility("default"))) int hopper_backward_shared_bytes() { return Shape<128, true, STEPS_LISTED, SUMS_ORDERED>::SHARED; }
