// Decoding on the host. Who includes this file names the elements T.
#include "decode.cuh"
#include "host.cuh"

namespace {

// A launch that may begin before the one before it has ended.
template <typename... P, typename... A>
cudaError_t launch_early(cudaLaunchConfig_t config, void (*kernel)(P...), const A&... arguments) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <int D, int GROUPS>
cudaError_t launch_merge(const Problem& call, cudaStream_t stream) {
    using M = Merging<D, GROUPS>;
    const dim3 rows(call.height(), call.key_heads, call.batch);
    return launch_early(configured(rows, M::THREADS, M::SHARED, stream), merge<D, GROUPS>, call);
}

template <int D>
cudaError_t launch(const Problem& call, cudaStream_t stream) {
    using L = Layout<D>;
    CUtensorMap k, v;
    const int end = max(call.first + call.seen, 1);
    cudaError_t error = describe(&k, call.k, call.batch, call.key_heads, end, D, L::KEYS, L::BOXES);
    if (!error) error = describe(&v, call.v, call.batch, call.key_heads, end, D, L::KEYS, L::BOXES);
    if (!error) error = cudaFuncSetAttribute(decode<L>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::SHARED);
    if (error) return error;
    const dim3 splits(call.key_heads, call.splits, call.batch);
    error = launch_early(configured(splits, THREADS, L::SHARED, stream), decode<L>, call, k, v);
    if (error || call.splits == 1) return error;
    return call.splits <= 8 * AT_ONCE ? launch_merge<D, 8>(call, stream) : launch_merge<D, 16>(call, stream);
}

}  // namespace

// Launch; an error of CUDA's, or 0.
extern "C" __attribute__((visibility("default"))) int hopper_decode(const Problem* call, cudaStream_t stream) {
    const OnDevice device(call->device);
    if (device.error) return device.error;
    switch (call->head_size) {
        case 64: return launch<64>(*call, stream);
        case 128: return launch<128>(*call, stream);
        case 256: return launch<256>(*call, stream);
    }
    return cudaErrorInvalidValue;
}

// What opkit's tests hold its own description of a call against, and what a block asks for of shared memory.
extern "C" __attribute__((visibility("default"))) int hopper_decode_call_bytes() { return sizeof(Problem); }
extern "C" __attribute__((visibility("default"))) int hopper_decode_shared_bytes() { return max(Layout<64>::SHARED, Layout<256>::SHARED); }
