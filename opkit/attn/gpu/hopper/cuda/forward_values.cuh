// Values in 8 bits become T, which holds them exactly, before they are multiplied with weights of 16 bits. Warps other
// than the one that loads did it in shared memory too, and took longer than this: products have most of its bandwidth.
#pragma once

#include "forward_tiles.cuh"
#include "host.cuh"

namespace {

using namespace sm90;

constexpr int WIDENERS = 256, PIECE = 8, AT_ONCE = 8;  // threads of a block; channels, and keys, that each takes

__host__ SM90 int keys_of_block(const Problem& problem) { return WIDENERS / (problem.value_size / PIECE) * AT_ONCE; }

// The values of some keys of a head; blocks are those of (keys, heads, batches).
template <typename E>
__global__ void __launch_bounds__(WIDENERS) widen(const __grid_constant__ Problem problem) {
    const int of_row = problem.value_size / PIECE, further = WIDENERS / of_row, column = threadIdx.x % of_row * PIECE;
    const int first = blockIdx.x * keys_of_block(problem) + threadIdx.x / of_row;
    const E* from = first_of<const E>(problem.narrow, blockIdx.z, blockIdx.y) + column;
    T* to = first_of<T>(problem.v, blockIdx.z, blockIdx.y) + column;
    launches_before_done();
    next_launch_may_begin();
    uint2 x[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const int key = first + n * further;
        x[n] = make_uint2(0, 0);
        if (key < problem.keys) x[n] = *reinterpret_cast<const uint2*>(from + key * problem.narrow.row);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const int key = first + n * further;
        if (key >= problem.keys) break;
        *reinterpret_cast<uint4*>(to + key * problem.v.row) =
            make_uint4(widened<E>(x[n].x), widened<E>(x[n].x >> 16), widened<E>(x[n].y), widened<E>(x[n].y >> 16));
    }
}

// On the host.
template <typename E>
cudaError_t widen_values(const Problem& call, cudaStream_t stream) {
    const dim3 blocks((call.keys + keys_of_block(call) - 1) / keys_of_block(call), call.heads / call.group, call.batch);
    return launch_early(configured(blocks, WIDENERS, 0, stream), widen<E>, call);
}

}  // namespace
