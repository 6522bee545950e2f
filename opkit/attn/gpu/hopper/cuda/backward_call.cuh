// A call of the backward: the structure that it is, and how TMA finds its tensors.
#pragma once

#include <type_traits>

#include "asked.cuh"

namespace {

using namespace sm90;

constexpr bool BY_KEYS = true;  // rows are keys, columns are queries
// Whether logits become other numbers before their softmax: then products do not add what their exponents take, and threads do.
constexpr bool CHANGED = CAPPED || SCORED;

// A call. Query i sees key j if lower <= j - i <= upper, where there is a band. opkit/attn/gpu/hopper/backward_cuda.py fills it.
struct Problem {
    Rows q, k, v, out, gradient, of_q, of_k, of_v, lse, of_lse;  // of_lse: no data if there is no gradient of the log-sum-exp
    Lists lists;
    float* delta;  // (batch, heads, queries), dense
    float* sums;   // of a block of rows: what products read of them, four floats for each and then four more (backward_rows.cuh)
    float* total;  // of a block of rows: parts of the gradient of queries, in the order of threads
    int* counter;  // of tiles, of items that helpers prepare and finish, and counts of heads (backward_tiles.cuh)
    float* exact;  // of rows with huge logits two numbers; and how many there are, zeros (backward_after.cuh). Null: no logits are huge
    int* large;
    const float* sinks;  // (heads,)
    int batch, heads, key_heads, queries, keys, head_size, value_size, lower, upper;
    int section;   // heads of keys whose tiles are interleaved, so that their queries stay in the L2 cache
    int turned;    // where sums are made in order: of tiles, how many go from the first queries to the last; the others the other way
    int prepared;  // heads of queries, the first ones, whose rows are prepared before the products
    int finished;  // heads of queries, the first ones, whose gradient helpers round during the products; of others a last kernel does
    int tiles, processors, device;
    float scale;
    float factor;         // of logits, whose exponentials' base is 2
    float inner, offset;  // of logits before a cap or users' functions, and what is added to exponents after it
    Mask mask;
    Functions functions;
};

// How TMA finds them: blocks of rows, keys and values; and for helpers pieces of blocks, and parts of the gradient of queries.
struct Maps {
    CUtensorMap q, k, v, gradient, piece_of_out, piece_of_gradient, part_of_q;
};

// Boxes next to one another from a row on, `bytes` each. ODD: one by one.
template <bool ODD, int BOXES>
SM90 void load_rows_of(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head, int batch, int bytes) {
    if constexpr (ODD) {
#pragma unroll
        for (int box = 0; box < BOXES; box++) load_box(to + box * bytes, map, barrier, row, 0, head, batch, box * COLUMNS);
    } else {
        load_boxes(to, map, barrier, row, head, batch);
    }
}

}  // namespace
