// The backward on the host. Who includes this file names the elements T.
#include "backward.cuh"
#include "host.cuh"

namespace {

template <class S>
cudaError_t launch(Problem problem, cudaStream_t stream) {
    const Problem& call = problem;
    CUtensorMap q, k, v, g;
    cudaError_t error = describe(&q, call.q, call.batch, call.heads, call.queries, call.head_size, S::ROWS, S::BOXES);
    if (!error) error = describe(&k, call.k, call.batch, call.key_heads, call.keys, call.head_size, KEYS, S::BOXES);
    if (!error) error = describe(&v, call.v, call.batch, call.key_heads, call.keys, call.value_size, KEYS, S::BOXES);
    if (!error) error = describe(&g, call.gradient, call.batch, call.heads, call.queries, call.value_size, S::ROWS, S::BOXES);
    if (!error) error = cudaFuncSetAttribute(gradients<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED);
    if (error) return error;
    problem.tiles = (call.keys + KEYS - 1) / KEYS * call.key_heads * call.batch;
    const int heads = call.batch * call.heads;
    const auto blocks = [&](int rows) { return dim3((call.queries + rows - 1) / rows, heads); };
    cudaLaunchConfig_t config = configured(blocks(S::ROWS), ROW_THREADS, 0, stream);
    error = cudaLaunchKernelEx(&config, before<S>, problem);
    if (error) return error;
    config = configured(dim3(min(call.tiles, call.processors)), THREADS, S::SHARED, stream);
    error = cudaLaunchKernelEx(&config, gradients<S>, problem, q, k, v, g);
    if (error) return error;
    config = configured(blocks(HALF), ROW_THREADS, 0, stream);
    return cudaLaunchKernelEx(&config, after<S::D>, problem);
}

template <int D>
cudaError_t launch_for(const Problem& call, cudaStream_t stream) {
    return call.banded ? launch<Shape<D, true>>(call, stream) : launch<Shape<D, false>>(call, stream);
}

}  // namespace

// Launch the three kernels; an error of CUDA's, or 0.
extern "C" __attribute__((visibility("default"))) int hopper_backward(const Problem* call, cudaStream_t stream) {
    const OnDevice device(call->device);
    if (device.error) return device.error;
    const bool narrow = call->head_size <= 64 && call->value_size <= 64;
    return narrow ? launch_for<64>(*call, stream) : launch_for<128>(*call, stream);
}

// What opkit's tests hold its own description of a call against, and what a block asks for of shared memory.
extern "C" __attribute__((visibility("default"))) int hopper_backward_call_bytes() { return sizeof(Problem); }
extern "C" __attribute__((visibility("default"))) int hopper_backward_shared_bytes() { return Shape<128, true>::SHARED; }
