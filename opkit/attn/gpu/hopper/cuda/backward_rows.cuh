// What goes before and after the backward, row by row: sums of rows, and the gradient of queries from its sum.
#pragma once

#include "backward_tiles.cuh"

namespace {

using namespace sm90;

// ---- before and after -----------------------------------------------------------------------------------------------------

SM90 float dot(const uint4& a, const uint4& b) {
    const T *x = reinterpret_cast<const T*>(&a), *y = reinterpret_cast<const T*>(&b);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(float(x[i]), float(y[i]), sum);
    return sum;
}

// A number as a sum of numbers of 11 bits, which TF32 has.
SM90 float4 in_parts(float x) {
    if (!(fabsf(x) < INFINITY)) return make_float4(x, 0, 0, 0);
    const float high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000u), rest = x - high;
    const float middle = __uint_as_float(__float_as_uint(rest) & 0xFFFFE000u);
    return make_float4(high, middle, rest - middle, 0);
}

// Of a block of rows what the other kernels read of them, and zeros for the sum of their gradients. The last rows come first:
// the next kernel begins with the first heads, whose numbers then are in the L2 cache.


template <class S>
__global__ void __launch_bounds__(ROW_THREADS) before(const __grid_constant__ Problem problem) {
    constexpr int OF_ROW = S::D / 8, AT_ONCE = ROW_THREADS / OF_ROW, PASSES = S::ROWS / AT_ONCE;
    const int of_head = gridDim.y - 1 - blockIdx.y, at = gridDim.x - 1 - blockIdx.x;
    const int batch = of_head / problem.heads, head = of_head % problem.heads;
    const int column = threadIdx.x % OF_ROW * 8, first = threadIdx.x / OF_ROW;
    const int64_t block = int64_t(of_head) * gridDim.x + at;
    const T *out = first_of<const T>(problem.out, batch, head), *gradient = first_of<const T>(problem.gradient, batch, head);
    uint4 x[PASSES], y[PASSES];
    float power[PASSES], less[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int row = at * S::ROWS + i * AT_ONCE + first;
        x[i] = y[i] = make_uint4(0, 0, 0, 0);
        power[i] = -INFINITY, less[i] = 0;
        if (row >= problem.queries) continue;
        if (column < problem.value_size) {
            x[i] = *reinterpret_cast<const uint4*>(out + row * problem.out.row + column);
            y[i] = *reinterpret_cast<const uint4*>(gradient + row * problem.gradient.row + column);
        }
        if (column == 0) {
            power[i] = first_of<const float>(problem.lse, batch, head)[row * problem.lse.row];
            if (problem.of_lse.data) less[i] = first_of<const float>(problem.of_lse, batch, head)[row * problem.of_lse.row];
        }
    }
    float4* zeros = reinterpret_cast<float4*>(problem.total + block * (2 * PART));
#pragma unroll
    for (int i = 0; i < 2 * PART / 4 / ROW_THREADS; i++) zeros[i * ROW_THREADS + threadIdx.x] = make_float4(0, 0, 0, 0);
    float4* sums = reinterpret_cast<float4*>(problem.sums) + block * (2 * S::ROWS);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        float sum = dot(x[i], y[i]);
#pragma unroll
        for (int bit = OF_ROW / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        sum -= less[i];
        const int within = i * AT_ONCE + first, row = at * S::ROWS + within;
        if (column != 0) continue;
        sums[within] = in_parts(power[i] == -INFINITY ? -INFINITY : -power[i] / problem.scale);
        sums[S::ROWS + within] = in_parts(-sum);
        if (row < problem.queries) problem.delta[int64_t(of_head) * problem.queries + row] = sum;
    }
    if (block == 0 && threadIdx.x == 0) *problem.counter = 0;
}

// The gradient of 64 queries: what was summed up for them, times the scale, rounded. A thread takes what the four threads of a
// quad had of eight channels of two rows.
template <int D>
__global__ void __launch_bounds__(ROW_THREADS) after(const __grid_constant__ Problem problem) {
    const int of_head = gridDim.y - 1 - blockIdx.y, at = gridDim.x - 1 - blockIdx.x;
    // Blocks of 128 rows where heads are of 64: two parts are two times 64 rows.
    const int64_t parts = D == HALF ? int64_t(of_head) * (2 * ((problem.queries + 127) / 128)) + at : (int64_t(of_head) * gridDim.x + at) * 2;
    T* of_q = first_of<T>(problem.of_q, of_head / problem.heads, of_head % problem.heads);
    const int eight = threadIdx.x % 8, quad = threadIdx.x / 8 % 8, warp = threadIdx.x / 64;
    float4 x[D / HALF][4];
#pragma unroll
    for (int p = 0; p < D / HALF; p++) {
        const float4* from = reinterpret_cast<const float4*>(problem.total + (parts + p) * PART) + eight * WARPGROUP + 32 * warp + 4 * quad;
#pragma unroll
        for (int t = 0; t < 4; t++) x[p][t] = from[t];
    }
    const float scale = problem.scale;
#pragma unroll
    for (int p = 0; p < D / HALF; p++) {
        const int row = at * HALF + 16 * warp + quad, column = p * HALF + 8 * eight;
        uint32_t low[4], high[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            low[t] = pack<T>(x[p][t].x * scale, x[p][t].y * scale);
            high[t] = pack<T>(x[p][t].z * scale, x[p][t].w * scale);
        }
        if (column >= problem.head_size) continue;
        T* to = of_q + row * problem.of_q.row + column;
        if (row < problem.queries) *reinterpret_cast<uint4*>(to) = make_uint4(low[0], low[1], low[2], low[3]);
        if (row + 8 < problem.queries) *reinterpret_cast<uint4*>(to + 8 * problem.of_q.row) = make_uint4(high[0], high[1], high[2], high[3]);
    }
}

}  // namespace
