// One part of decoding attention: the query rows of one KV head against keys [begin, end) of one sequence.
#pragma once

#include <stdint.h>

#include "block.hpp"

namespace opkit::attention {

enum ElementType : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2, kI8 = 3, kF8 = 4 };  // kF8: float8_e4m3fn

constexpr int64_t kLargestHead = 1024;  // of the sizes d and dv
constexpr int64_t kTileKeys = 64;       // keys between two updates of the softmax; a multiple of every ISA's lanes
constexpr int64_t kUnlimited = int64_t{1} << 62;

struct DecodeTask;

// What the rows of a task see of keys [key, key + keys), which lie in one tile, as a word of bits for each row; false: nothing.
using DecodeLook = bool (*)(const DecodeTask& task, int64_t key, int64_t keys, uint64_t* visible);
// Adds what is added to the logits of these keys, kTileKeys to a row, and applies users' functions.
using DecodeApply = void (*)(const DecodeTask& task, int64_t key, int64_t keys, float* logits);

// The rows of keys or values of one head. Distances are in bytes, those of scales in elements.
struct DecodeRows {
    const unsigned char* data;
    int64_t page, token;
    const float* scale;  // or null
    int64_t scale_page, scale_token;
    int64_t size;        // elements of a row, which are contiguous
};

struct DecodeTask {
    const unsigned char* q;       // row g * queries + i is at q + g * q_head + i * q_token; its d elements are contiguous
    int64_t q_head, q_token;      // bytes
    int64_t group, queries;
    DecodeRows k, v;
    const int32_t* pages;         // of the sequence; null: there is one page
    int64_t page_size;
    int64_t begin, end;           // keys of this part
    int64_t length;               // keys of the sequence
    int64_t lower, upper;         // query i sees key j iff lower <= j - i <= upper and j < length
    float scale, softcap;         // softcap 0: none
    ElementType q_type, kv_type;
    int64_t kv_bytes;             // of an element
    float *maximum, *total, *sum; // results: of each row its greatest logit, sum of weights, and dv weighted sums of values
    DecodeLook look;              // null: the band and the length decide alone
    DecodeApply apply;            // null: nothing is added
    const void* context;          // of both
    int64_t sequence, head, row;  // theirs: the sequence, the first query head, and the position of the first query
    const DecodeTask* following;  // the thread's next part, whose first tile is prefetched; or null
    bool prefetched;              // this part's first tile was
    void* workspace;              // decode_workspace bytes at a multiple of 64
};

namespace {  // ISA files include this: see isa/table.hpp

// Rows are computed in blocks of 16, the rest in one of a power of two.
inline int64_t padded_rows(int64_t rows) {
    int64_t rest = rows % 16, block = rest ? 1 : 0;
    while (block < rest) block *= 2;
    return rows - rest + block;
}

// Queries and sums in cells of 4 bytes to whole blocks of at most 64 cells, two cells for a word; a tile of logits; words of bits.
inline int64_t decode_workspace(int64_t rows, int64_t d, int64_t dv) {
    const int64_t cells = (d + 63) / 64 * 64, sums = (dv + 63) / 64 * 64;
    return padded_rows(rows) * 4 * (cells + sums + 2 * kTileKeys + 16 + 16) + 64;
}

}  // namespace

}  // namespace opkit::attention
