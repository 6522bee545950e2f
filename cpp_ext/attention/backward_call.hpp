// Gradients of attention of whole tensors.
#pragma once

#include "forward_call.hpp"

namespace opkit::attention {

struct Gradients {
    Operand out, gradient;        // the result and its gradient, of the type of q
    const float *lse, *of_lse;    // (batch, heads, queries); of_lse may be null
    Operand q, k, v;              // where the gradients go; data is written
    float* delta;                 // (batch, heads, queries), written: the sum of result * gradient, less of_lse
    const float* log_totals = nullptr;  // as a BackwardTile has them
};

// The result is the same whatever the number of threads. `call.out` and `call.lse` are not used.
void backward(const Call& call, const Gradients& gradients);

}  // namespace opkit::attention
