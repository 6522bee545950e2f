// Values in 8 bits become T, which holds them exactly, before they are multiplied with weights of 16 bits. Warps other
// than the one that loads did it in shared memory too, and took longer than this: products have most of its bandwidth.
#pragma once

#include "forward_tiles.cuh"

namespace {

using namespace sm90;

constexpr int WIDENERS = 256, PIECE = 8, AT_ONCE = 8;  // threads of a block; channels, and keys, that each takes

// The values of some keys of a head; blocks are those of (keys, heads, batches).
template <typename E>
SM90 void widen(const Problem& problem, const Maps&) {
    const int of_row = problem.value_size / PIECE, further = WIDENERS / of_row, column = threadIdx.x % of_row * PIECE;
    const int first = blockIdx.x * further * AT_ONCE + threadIdx.x / of_row;
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

}  // namespace
