// What products of the backward read of rows, and the kernel that prepares it for the first heads, before the products. Helpers do so
// for the others.
#pragma once

#include "backward_tiles.cuh"

namespace {

using namespace sm90;

template <class Four>
SM90 float dot(const Four& a, const Four& b) {  // of 8 elements each
    T x[8], y[8];
    memcpy(x, &a, 16), memcpy(y, &b, 16);
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

// A row's log-sum-exp, and its gradient.
struct Numbers {
    float power = -INFINITY, gradient = 0;
};

SM90 Numbers numbers_of(const Problem& problem, int of_head, int row) {
    Numbers found;
    if (row >= problem.queries) return found;
    const int batch = of_head / problem.heads, head = of_head % problem.heads;
    found.power = first_of<const float>(problem.lse, batch, head)[row * problem.lse.row];
    if (problem.of_lse.data) found.gradient = first_of<const float>(problem.of_lse, batch, head)[row * problem.of_lse.row];
    return found;
}

// Whether another kernel adds a row's part of the gradients, with logits that are exact to the rounding of products: of a log-sum-exp
// as large as L the rounding, up to L / 2^24, would be seen in probabilities. Not of those whose gradients are NaN anyway.
SM90 bool is_large(float power, float delta) {
    constexpr float LARGE = 4096;
    return fabsf(power) > LARGE && fabsf(power) < INFINITY && fabsf(delta) < INFINITY;
}

// What is added to the logits of a row that is not there, sees nothing, or is computed elsewhere. Products add it to theirs, and those that
// are not finite are looked into.
SM90 float no_weights() { return CHANGED ? -INFINITY : -1e30f; }

// What is added to a row's logits, so that their exponentials are probabilities; for changed logits, which have a factor of their own,
// to exponents.
template <class S>
SM90 float power_of(const Problem& problem, float lse, float delta) {
    if (lse == -INFINITY) return no_weights();
    if (S::HIDES_ROWS && !(fabsf(delta) < INFINITY)) return NAN;  // what the row sees is to be NaN, though its gradient be cleaned
    if (problem.large && is_large(lse, delta)) {
        *problem.large = 1;
        return no_weights();
    }
    return CHANGED ? problem.offset - lse * LOG2E : -lse / problem.scale;
}

// Publish what products read of a row, whose result times its gradient sums up to `sum`, and its delta. Products add the numbers of
// logits by one of their own, and those of changed logits are read by threads.
template <class S>
SM90 void publish_row(const Problem& problem, int of_head, int row, const Numbers& numbers, float sum) {
    const float delta = sum - numbers.gradient, power = power_of<S>(problem, numbers.power, delta);
    float* block = sums_of<S>(problem, of_head, row / S::ROWS);
    float4* to = reinterpret_cast<float4*>(block) + row % S::ROWS;
    if (CHANGED) block[row % S::ROWS] = power;
    else to[0] = in_parts(power);
    to[S::ROWS] = in_parts(-delta);
    if (row < problem.queries) problem.delta[int64_t(of_head) * problem.queries + row] = delta;
}

// What products read of a block of rows, and zeros for the sum of their gradients. The last rows come first: products begin with
// the first heads, whose numbers then are in the L2 cache.
template <class S>
SM90 void before(const Problem& problem, const Maps&) {
    launches_before_done();
    next_launch_may_begin();
    constexpr int OF_ROW = S::D / 8, AT_ONCE = ROW_THREADS / OF_ROW, PASSES = S::ROWS / AT_ONCE;
    const int64_t block = gridDim.x - 1 - blockIdx.x;
    const int blocks = blocks_of<S>(problem), of_head = int(block / blocks), at = int(block % blocks);
    const int batch = of_head / problem.heads, head = of_head % problem.heads;
    const int column = threadIdx.x % OF_ROW * 8, first = threadIdx.x / OF_ROW;
    const T *out = first_of<const T>(problem.out, batch, head), *gradient = first_of<const T>(problem.gradient, batch, head);
    uint4 x[PASSES], y[PASSES];
    Numbers numbers[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        const int row = at * S::ROWS + i * AT_ONCE + first;
        x[i] = y[i] = make_uint4(0, 0, 0, 0);
        if (row < problem.queries && column < problem.value_size) {
            x[i] = *reinterpret_cast<const uint4*>(out + row * problem.out.row + column);
            y[i] = *reinterpret_cast<const uint4*>(gradient + row * problem.gradient.row + column);
        }
        if (column == 0) numbers[i] = numbers_of(problem, of_head, row);
    }
    float4* zeros = reinterpret_cast<float4*>(problem.total + block * (S::PARTS * PART));
#pragma unroll
    for (int i = 0; i < (S::ALONE ? 0 : S::PARTS * PART / 4 / ROW_THREADS); i++) zeros[i * ROW_THREADS + threadIdx.x] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        float sum = dot(x[i], y[i]);
#pragma unroll
        for (int bit = OF_ROW / 2; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
        if (column == 0) publish_row<S>(problem, of_head, at * S::ROWS + i * AT_ONCE + first, numbers[i], sum);
    }
    if (block == 0)
        for (int i = threadIdx.x; i < counts_of<S>(problem); i += ROW_THREADS) problem.counter[i] = 0;
}

}  // namespace
