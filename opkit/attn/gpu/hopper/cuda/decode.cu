// Decoding on the host. Who includes this file names the elements T.
#include "decode.cuh"
#include "host.cuh"

namespace {

template <int D, int GROUPS>
cudaError_t launch_merge(const Problem& call, cudaStream_t stream) {
    using M = Merging<D, GROUPS>;
    const dim3 rows(call.height(), call.key_heads, call.batch);
    return launch_early(configured(rows, M::THREADS, M::SHARED, stream), merge<D, GROUPS>, call);
}

// Keys and values as TMA finds them: boxes of some keys of a head, of a batch or of a page.
template <typename L>
cudaError_t described(const Problem& call, CUtensorMap* k, CUtensorMap* v) {
    const int batch = L::PAGED ? call.pages.count : call.batch, keys = L::PAGED ? call.pages.size : max(call.first + call.seen, 1);
    const cudaError_t error = describe(k, call.k, batch, call.key_heads, keys, L::D, L::BOX_ROWS, L::BOXES);
    return error ? error : describe(v, call.v, batch, call.key_heads, keys, L::D, L::BOX_ROWS, L::BOXES);
}

template <typename L>
cudaError_t launch(const Problem& call, cudaStream_t stream) {
    CUtensorMap k, v;
    cudaError_t error = described<L>(call, &k, &v);
    if (!error) error = cudaFuncSetAttribute(decode<L>, cudaFuncAttributeMaxDynamicSharedMemorySize, L::SHARED);
    if (error) return error;
    const dim3 splits(call.key_heads, call.splits, call.batch);
    error = launch_early(configured(splits, THREADS, L::SHARED, stream), decode<L>, call, k, v);
    if (error || call.splits == 1) return error;
    return call.splits <= 8 * AT_ONCE ? launch_merge<L::D, 8>(call, stream) : launch_merge<L::D, 16>(call, stream);
}

// By the channels of heads, and how many rows of these a tile has.
template <bool PAGED>
cudaError_t launch_for(const Problem& call, cudaStream_t stream) {
    switch (call.head_size * 2 + (call.height() > 16)) {
        case 64 * 2: return launch<Layout<64, PAGED, 1>>(call, stream);
        case 64 * 2 + 1: return launch<Layout<64, PAGED, 2>>(call, stream);
        case 128 * 2: return launch<Layout<128, PAGED, 1>>(call, stream);
        case 128 * 2 + 1: return launch<Layout<128, PAGED, 2>>(call, stream);
        case 256 * 2: return launch<Layout<256, PAGED, 1>>(call, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace

// Launch; an error of CUDA's, or 0.
extern "C" __attribute__((visibility("default"))) int hopper_decode(const Problem* call, cudaStream_t stream) {
    const OnDevice device(call->device);
    if (device.error) return device.error;
    return call->pages.count ? launch_for<true>(*call, stream) : launch_for<false>(*call, stream);
}

// What opkit's tests hold its own description of a call against, and what a block asks for of shared memory.
extern "C" __attribute__((visibility("default"))) int hopper_decode_call_bytes() { return sizeof(Problem); }
extern "C" __attribute__((visibility("default"))) int hopper_decode_shared_bytes() {
    return max(Layout<128, true, 2>::SHARED, Layout<256, true, 1>::SHARED);
}
