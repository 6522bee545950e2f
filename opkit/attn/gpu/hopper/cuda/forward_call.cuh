// A call of the forward: its elements, what it asks for, and the structure that it is.
#pragma once

#include <type_traits>

#include "asked.cuh"

namespace {

using namespace sm90;

// Elements of what is given, and of results; weights are of T. What is given in 8 bits stands for what it is times numbers of its heads,
// the descales, and values become T (forward_values.cuh).
#ifdef FLOAT8
using Key = FLOAT8;
using Result = Bfloat16;
#else
using Key = T;
using Result = T;
#endif
constexpr bool DESCALED = !std::is_same<Key, T>::value;

constexpr bool BY_KEYS = false;  // rows are queries, columns are keys

// A call. Query i sees key j if lower <= j - i <= upper, where there is a band. opkit/attn/gpu/hopper/forward_cuda.py fills it.
struct Problem {
    Rows q, k, v, out;
    float* lse;    // (batch, heads, queries), dense
    int* counter;  // of tiles, of blocks that have ended, marks of warpgroups, and marks of 64 rows each; zeros
    int batch, heads, group, queries, keys, head_size, value_size, lower, upper;
    int section;  // heads whose tiles are interleaved, whose keys the L2 cache about holds
    int blocks;   // tiles of a head
    int tiles;
    int processors, device;
    float factor;  // of logits, whose exponentials' base is 2
    Lists lists;
    Rows narrow;                      // values as they are given, if that is in 8 bits: v is room for others then, dense
    const float *q_by, *k_by, *v_by;  // descales, (batch, heads of keys), dense
    const float* sinks;               // (heads,)
    float inner, offset;              // of logits before a cap or a function, and what is added to exponents after a cap
    Mask mask;
    Functions functions;
};

// How TMA finds queries, keys and values; and results, 16 rows at once.
struct Maps {
    CUtensorMap q, k, v, out;
};

}  // namespace
