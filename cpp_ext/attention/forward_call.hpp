// Attention of whole tensors: packs keys and values once for each of their heads, and deals blocks of queries to threads.
#pragma once

#include <cstdint>

#include "bias.hpp"
#include "mask.hpp"
#include "packing.hpp"

namespace opkit::attention {

struct Call {
    int64_t batch, heads, kv_heads, queries, keys, head, columns;
    Operand q, k, v;         // of one type, not Double
    void* out;               // of that type: (batch, heads, queries, columns); or null
    int64_t out_stride[3];
    float* lse;              // (batch, heads, queries)
    const float* sinks;      // (heads), or null
    float scale, softcap;
    const Mask& mask;
    const Biases& biases;
    const isa::Table* kernels;
    float* log_totals = nullptr;  // of the size of lse; or null (see Block)

    bool paired() const { return is_paired(*kernels, q.type); }
};

// Of the forward; the backward has two and a half times as many. Whole tiles of keys are multiplied.
inline int64_t multiply_adds(const Call& call) {
    return call.batch * call.heads * call.queries * rounded_up(call.keys, kKeys) * (call.head + call.columns);
}

// The result is the same whatever the number of threads: a block does its tiles in their order.
void forward(const Call& call);

}  // namespace opkit::attention
