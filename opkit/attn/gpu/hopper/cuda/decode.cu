// Decoding on the host. Who includes this file names the elements T.
#include "decode.cuh"
#include "decode_together.cuh"
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
    const cudaError_t error = describe(k, call.k, batch, call.key_heads, keys, L::D, L::BOX_ROWS, L::BOXES_AT_ONCE);
    return error ? error : describe(v, call.v, batch, call.key_heads, keys, L::D, L::BOX_ROWS, L::BOXES_AT_ONCE);
}

template <typename L>
cudaError_t launch(const Problem& call, void (*kernel)(Problem, CUtensorMap, CUtensorMap), int threads, cudaStream_t stream) {
    CUtensorMap k, v;
    cudaError_t error = described<L>(call, &k, &v);
    if (!error) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::SHARED);
    if (error) return error;
    const dim3 splits(call.key_heads, call.splits, call.batch);
    error = launch_early(configured(splits, threads, L::SHARED, stream), kernel, call, k, v);
    if (error || call.splits == 1) return error;
    return call.splits <= 8 * AT_ONCE ? launch_merge<L::D, 8>(call, stream) : launch_merge<L::D, 16>(call, stream);
}

template <int D, bool PAGED, int SETS>
cudaError_t launch_apart(const Problem& call, cudaStream_t stream) {
    using L = Layout<D, PAGED, SETS>;
    return launch<L>(call, decode<L>, THREADS, stream);
}
template <int D, bool PAGED, int ROWS>
cudaError_t launch_together(const Problem& call, cudaStream_t stream) {
    using L = Together<D, PAGED, ROWS>;
    return launch<L>(call, decode_together<L>, GATHERED, stream);
}

// By the channels of heads and how many rows a tile has: of tiles that are divided, whose blocks have a few steps, a warpgroup multiplies
// wide ones together.
template <bool PAGED>
cudaError_t launch_for(const Problem& call, cudaStream_t stream) {
    const int d = call.head_size, rows = call.height();
    const bool divided = call.splits > 1;
    if (d == 64 && rows <= 16) return launch_apart<64, PAGED, 1>(call, stream);
    if (d == 64 && rows <= 32) return launch_apart<64, PAGED, 2>(call, stream);
    if (d == 64 && rows <= 64) return launch_together<64, PAGED, 64>(call, stream);
    if (d == 128 && rows <= 16) return launch_apart<128, PAGED, 1>(call, stream);
    if (d == 128 && rows <= 32 && !divided) return launch_apart<128, PAGED, 2>(call, stream);
    if (d == 128 && rows <= 32) return launch_together<128, PAGED, 32>(call, stream);
    if (d == 128 && rows <= 64) return launch_together<128, PAGED, 64>(call, stream);
    if (d == 256 && rows <= 16 && !divided) return launch_apart<256, PAGED, 1>(call, stream);
    if (d == 256 && rows <= 16) return launch_together<256, PAGED, 16>(call, stream);
    if (d == 256 && rows <= 32) return launch_together<256, PAGED, 32>(call, stream);
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
    return max(max(Layout<256, true, 1>::SHARED, Together<256, true, 32>::SHARED), Together<128, true, 64>::SHARED);
}
