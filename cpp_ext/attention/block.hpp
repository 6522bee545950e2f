// What one call of an ISA's attention kernel does: some query rows of one head against the keys that they see.
//
// Keys come in tiles of kKeys. Of a tile, K is stored as [words of a key][kKeys] and V as [keys of a word][words of a row], 32
// bits each: a float32, or a pair of bf16 (of K two neighbours of a row, of V the same column of two neighbouring keys; the
// layout called VNNI). Pairs of a key are padded with zeros to whole tiles of AMX, 16. What is missing at the edges is zero. So both products read a tile from its beginning to its end.
#pragma once

#include <stdint.h>

namespace opkit::attention {

constexpr int64_t kKeys = 64;        // of a tile: a row of visibility is one word of bits
constexpr int64_t kMostRows = 32;    // that an ISA computes together
constexpr int64_t kTilesAhead = 4;   // that an ISA may request at a time

// A largest score beyond it, as a product with a factor, is rounded by more than a quarter, and far beyond by so much that the power
// of what is rounded away overflows: then the other scores are to be rounded too.
constexpr float kFar = 0x1p23f;

// What weights, the exponentials of a row, are times: then the sum of 2^24 products with finite values is finite, as is their mean.
constexpr float kWeight = 0x1p-24f;

enum State : int32_t { kHidden = 0, kFull = 1, kPartial = 2 };

// What the rows see of a tile. Where that is a part, bit j of visible[row] is set if key j is seen. Where the block has biases,
// they are written too, kKeys to a row.
using Prepare = State (*)(void* context, int64_t tile, uint64_t* visible, float* biases);

// Users' functions, applied to the scores of rows [first, first + rows) of the block and a tile, kKeys to a row, `pitch` apart.
using Apply = void (*)(void* context, int64_t tile, int64_t first, int64_t rows, float* scores, int64_t pitch);
// From the scores before, kKeys to a row, and the gradients after, those before; `seen` is a word for each of the rows.
using Differentiate = void (*)(void* context, int64_t first, int64_t rows, const float* before, float* gradients, const uint64_t* seen);

struct Block {
    const void* queries;       // rows, `query_pitch` elements apart; float32 or bf16
    int64_t query_pitch;
    int64_t rows;              // at most the count passed to `rows_of_memory`
    int64_t head;              // elements of a query and of a key
    const uint32_t* keys;      // tile after tile
    int64_t of_keys;           // words of a tile of keys
    int64_t count;             // keys of all tiles: those that the last one has fewer are zero, and hidden
    const uint32_t* values;
    const uint8_t* unclean;    // of each tile: whether a value is infinite or NaN
    int64_t columns;           // of a value, padded to whole vectors of the widest ISA
    int64_t first, last;       // tiles
    Prepare prepare;
    void* context;
    float scale;               // of the products
    float softcap;             // 0: none
    bool biased;
    float sink;                // -inf: none
    float* sums;               // result: rows by columns; there is memory for a multiple of kMostRows
    float* lse;                // result: a number for each row
    float* log_totals;         // null; or result: the logarithms of the sums of exponentials, without which lse then is
    void* memory;              // block_memory(rows, head, biased) bytes, aligned to 64
    Apply apply = nullptr;     // after what is added; null: nothing
};

// Some query rows of one head against one tile of keys, backwards. Rows beyond the last are zero in all that is packed.
struct BackwardTile {
    const void *queries, *gradients;        // rows of cells (cells_of, in multiply.hpp), those of gradients of `value` elements
    const uint32_t *query_words, *gradient_words;  // the same rows as values are stored
    const uint32_t *keys, *values;          // the tile, both as keys are stored
    const uint32_t* key_words;              // the keys as values are stored
    int64_t rows;                           // at most kBackwardRows
    int64_t head, value;                    // elements of a key, of a value
    int64_t columns, value_columns;         // the same, padded to whole vectors
    const float *lse, *delta;               // of each row; delta: the sum of gradient * result, less that of the lse
    const float* log_totals;                // null; or of each row what its lse is without, as a Block gives both
    const uint64_t* visible;                // null: everything
    const float* biases;                    // null: none
    float scale, softcap;
    float *query_sums, *key_sums, *value_sums;  // what is added to: rows, keys and keys by columns; the first two without the scale;
                                            // null: `differentiate` alone reads the gradients
    void* memory;                           // kBackwardMemory bytes, aligned to 64
    Apply apply = nullptr;                  // after what is added, and
    Differentiate differentiate = nullptr;  // its derivative; both or none are null
    void* context = nullptr;
};

constexpr int64_t kBackwardRows = 96;
constexpr int64_t kBackwardMemory = 4 * kBackwardRows * kKeys * 3 + 4 * kMostRows * kKeys * 2;

constexpr int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

constexpr int64_t block_memory(int64_t rows, int64_t head, bool biased) {
    const int64_t padded = rounded_up(rows, kMostRows) + kMostRows;
    const int64_t of_row = 4 * (rounded_up(head, 32) + 32 + 24) + 8 * kTilesAhead + (biased ? 4 * kKeys * kTilesAhead : 0);
    return padded * of_row + 4 * kMostRows * 3 * kKeys + 1024;
}

}  // namespace opkit::attention
