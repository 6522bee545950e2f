// A call of the forward: its elements, what it asks for, and the structure that it is.
#pragma once

#include <type_traits>

#include "functions.cuh"
#include "tensors.cuh"

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

// What a call may ask for in addition: who includes the kernels says so (opkit/attn/gpu/hopper/forward_kinds.py). ODD: rows of queries and
// keys, or of values, end within a box; then boxes are loaded one by one, and what is not there is zeros.
struct Asked {
    bool capped, sinks, lengths, odd_keys, odd_values;
};
#ifndef ASKED
#define ASKED
#endif
constexpr Asked OF_CALL = {ASKED};
constexpr bool CAPPED = OF_CALL.capped, SINKS = OF_CALL.sinks, LENGTHS = OF_CALL.lengths;
constexpr bool ODD_KEYS = OF_CALL.odd_keys, ODD_VALUES = OF_CALL.odd_values;
#ifdef MASK_PROGRAM
constexpr bool PROGRAM = true;
#else
constexpr bool PROGRAM = false;
#endif
#ifdef SCORE
constexpr bool SCORED = true;
#else
constexpr bool SCORED = false;
#define SCORE(...) 0.f
#endif

// A tensor that a mask's program reads, with its strides by batch, head, query and key.
struct Slot {
    const void* data;
    int64_t batch, head, query, key;
};

// What a mask says besides a band and segments: how many keys each batch has, and what a program reads (forward_masks.cuh). Lists of
// tiles may be of a head then.
struct Mask {
    const int* lengths;
    int64_t lengths_batch, blocks_head, counts_head;
    Slot slots[6];
    int numbers[8];
};

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
