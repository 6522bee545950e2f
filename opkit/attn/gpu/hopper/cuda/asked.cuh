// What calls may ask for in addition to the least, and what their masks read: for the forward and the backward.
#pragma once

#include "functions.cuh"
#include "tensors.cuh"

namespace {

// Who includes the kernels says what a call asks for (opkit/attn/gpu/hopper/forward_kinds.py). ODD: rows of queries and keys, or of
// values, end within a box; then boxes are loaded one by one, and what is not there is zeros.
struct Asked {
    bool capped, sinks, lengths, odd_keys, odd_values;
};
#ifndef ASKED
#define ASKED
#endif
constexpr Asked OF_CALL = {ASKED};
constexpr bool CAPPED = OF_CALL.capped, SINKS = OF_CALL.sinks, LENGTHS = OF_CALL.lengths;
constexpr bool ODD_KEYS = OF_CALL.odd_keys, ODD_VALUES = OF_CALL.odd_values;
#ifdef TILE_KEYS  // a mask is read as bits of tiles of so many keys and TILE_QUERIES queries
constexpr bool PROGRAM = true;
#else
constexpr bool PROGRAM = false;
#define TILE_QUERIES 32
#define TILE_KEYS 32
#endif
#ifdef MASK_PROGRAM  // some tiles have no bits
constexpr bool EVALUATED = true;
#else
constexpr bool EVALUATED = false;
#define MASK_PROGRAM {}
#endif
#ifdef SCORE
constexpr bool SCORED = true;
#else
constexpr bool SCORED = false;
#define SCORE(...) {}
#endif
#ifndef KEYS_READ  // whether SCORE loads numbers of keys alone, in their order
#define KEYS_READ false
#endif

// A tensor that a mask's program reads, with its strides by batch, head, query and key.
struct Slot {
    const void* data;
    int64_t batch, head, query, key;
};

// What a mask says, as bits of those tiles that are visible in part: where in `words` those of each tile are, by tiles of queries and of
// keys, or one of these numbers; with strides by batch and head. Without MASK_PROGRAM there are bits of every such tile.
struct Bits {
    const uint32_t* words;
    const int* places;
    int64_t batch, head;
};
constexpr int NO_BITS = -1, ALL_FALSE = -2, ALL_TRUE = -3;

// What a mask says besides a band and segments: how many keys each batch has, bits, and what a program reads where there are none
// (masks.cuh). Lists of tiles may be of a head then.
struct Mask {
    const int* lengths;
    int64_t lengths_batch, blocks_head, counts_head;
    Slot slots[6];
    int numbers[8];
    Bits bits;
};

}  // namespace
