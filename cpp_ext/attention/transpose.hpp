// Keys by rows to a tile of columns, a word at a time.
#pragma once

#include <stdint.h>

#include "block.hpp"

namespace opkit::attention {
namespace {

inline void transpose_part(const uint32_t* rows, int64_t pitch, int64_t first_key, int64_t last_key, int64_t first_word,
                           int64_t last_word, uint32_t* out, int64_t out_pitch) {
    for (int64_t word = first_word; word < last_word; ++word)
        for (int64_t key = first_key; key < last_key; ++key) out[word * out_pitch + key] = rows[key * pitch + word];
}

inline void transpose_words(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out) {
    transpose_part(rows, pitch, 0, keys, 0, words, out, kKeys);
}

struct PlainTranspose {
    static void transposed(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
        transpose_part(rows, pitch, 0, keys, 0, words, out, out_pitch);
    }
};

}  // namespace
}  // namespace opkit::attention
