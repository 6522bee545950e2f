// The forward on the host. Who includes this file names the elements T, and may say that steps are listed, or of which FLOAT8 queries,
// keys and values are.
#include "forward.cuh"
#include "forward_values.cuh"

#ifndef STEPS_LISTED
#define STEPS_LISTED false
#endif

namespace {

template <typename L, bool BANDED>
cudaError_t launch(Problem problem, cudaStream_t stream) {
    const Problem& call = problem;
    CUtensorMap q, k, v;
    const int key_heads = call.heads / call.group;
    cudaError_t error = describe<Key>(&q, call.q, call.batch, call.heads, call.queries, call.head_size, L::ROWS, L::KEY_BOXES);
    if (!error) error = describe<Key>(&k, call.k, call.batch, key_heads, call.keys, call.head_size, L::KEYS, L::KEY_BOXES);
    if (!error) error = describe(&v, call.v, call.batch, key_heads, call.keys, call.value_size, L::KEYS, L::VALUE_BOXES);
    if (!error) error = cudaFuncSetAttribute(attention<L, BANDED>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::SHARED);
    if constexpr (DESCALED) {
        if (!error) error = widen_values<Key>(call, stream);
    }
    if (error) return error;
    problem.blocks = (call.queries + L::ROWS - 1) / L::ROWS;
    problem.tiles = call.batch * call.heads * call.blocks;
    const cudaLaunchConfig_t config = configured(dim3(min(call.tiles, call.processors)), L::THREADS, L::SHARED, stream);
    return launch_early(config, attention<L, BANDED>, problem, q, k, v);
}

template <typename L>
cudaError_t launch_for(const Problem& call, cudaStream_t stream) {
    return call.banded ? launch<L, true>(call, stream) : launch<L, false>(call, stream);
}

// By the channels of heads, some of them where steps are listed.
template <bool LISTED>
cudaError_t launch_one(const Problem& call, cudaStream_t stream) {
    if constexpr (LISTED) {
        if (call.head_size == 64) return launch<Listed<Brief>, true>(call, stream);
        return call.head_size == 128 ? launch<Listed<Middle>, true>(call, stream) : cudaErrorInvalidValue;
    } else {
        if (call.head_size == 128) return launch_for<Middle>(call, stream);
        if (call.head_size == 256) return launch_for<Wide>(call, stream);
        if (call.head_size != 64) return cudaErrorInvalidValue;
        if (call.brief) return launch_for<Brief>(call, stream);
        return call.banded ? launch<Narrow<false>, true>(call, stream) : launch<Narrow<true>, false>(call, stream);
    }
}

}  // namespace

// Launch; an error of CUDA's, or 0.
extern "C" __attribute__((visibility("default"))) int hopper_forward(const Problem* call, cudaStream_t stream) {
    const OnDevice device(call->device);
    if (device.error) return device.error;
    return launch_one<STEPS_LISTED>(*call, stream);
}

// What opkit's tests hold its own description of a call against, and what a block asks for of shared memory.
extern "C" __attribute__((visibility("default"))) int hopper_forward_call_bytes() { return sizeof(Problem); }
extern "C" __attribute__((visibility("default"))) int hopper_forward_shared_bytes() {
    if (STEPS_LISTED) return max(Listed<Brief>::SHARED, Listed<Middle>::SHARED);
    return max(max(Narrow<true>::SHARED, Brief::SHARED), max(Middle::SHARED, Wide::SHARED));
}
