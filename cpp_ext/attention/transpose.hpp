// Rows of words to columns.
#pragma once

#include <stdint.h>

#include "../isa/unroll.hpp"
#include "block.hpp"

namespace opkit::attention {
namespace {

inline void turn_part(const uint32_t* rows, int64_t pitch, int64_t first_key, int64_t last_key, int64_t first_word,
                      int64_t last_word, uint32_t* out, int64_t out_pitch) {
    for (int64_t word = first_word; word < last_word; ++word)
        for (int64_t key = first_key; key < last_key; ++key) out[word * out_pitch + key] = rows[key * pitch + word];
}

template <class V>
inline __attribute__((always_inline)) void turn_square(const uint32_t* rows, int64_t pitch, uint32_t* out, int64_t out_pitch) {
    typename V::Words w[V::kLanes];
    OPKIT_UNROLL
    for (int i = 0; i < V::kLanes; ++i) w[i] = V::words(rows + i * pitch);
    V::transpose(w);
    OPKIT_UNROLL
    for (int i = 0; i < V::kLanes; ++i) V::store(reinterpret_cast<float*>(out + i * out_pitch), V::floats(w[i]));
}

// Rows of `words` words, `pitch` apart, to columns: squares of V's lanes, and what is left word by word.
template <class V>
void turn_words(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
    const int64_t whole_keys = keys / V::kLanes * V::kLanes, whole_words = words / V::kLanes * V::kLanes;
    for (int64_t key = 0; key < whole_keys; key += V::kLanes)
        for (int64_t word = 0; word < whole_words; word += V::kLanes)
            turn_square<V>(rows + key * pitch + word, pitch, out + word * out_pitch + key, out_pitch);
    turn_part(rows, pitch, whole_keys, keys, 0, whole_words, out, out_pitch);
    turn_part(rows, pitch, 0, keys, whole_words, words, out, out_pitch);
}

// Keys by rows to a tile of columns.
template <class V>
void transpose_words(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out) {
    V::transposed(rows, pitch, keys, words, out, kKeys);
}

}  // namespace
}  // namespace opkit::attention
