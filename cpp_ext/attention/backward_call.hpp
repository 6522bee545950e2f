// Gradients of attention of whole tensors.
#pragma once

#include <vector>

#include "forward_call.hpp"

namespace opkit::attention {

struct Gradients {
    Operand out, gradient;        // the result and its gradient, of the type of q
    const float *lse, *of_lse;    // (batch, heads, queries); of_lse may be null
    Operand q, k, v;              // where the gradients go; data is written
    float* delta;                 // (batch, heads, queries), written: the sum of result * gradient, less of_lse
    const float* log_totals = nullptr;  // as a BackwardTile has them
};

// The gradient of a tensor of the biases, contiguous and zero before.
struct BiasGradient {
    double* data;                    // null: it is not needed
    int64_t elements, stride[4];     // strides of a tensor that is added
    bool by_batch, by_head, by_key;  // whether other sequences, heads and keys read other elements
};

// The result is the same whatever the number of threads. `call.out` and `call.lse` are not used. `wanted` are the gradients of
// biases, one for each of their tensors; without place for that of q they alone are computed, and delta is read.
void backward(const Call& call, const Gradients& gradients, const std::vector<BiasGradient>& wanted = {});

}  // namespace opkit::attention
