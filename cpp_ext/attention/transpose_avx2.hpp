// Keys by rows to a tile of columns, 8 x 8 words at a time.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "transpose.hpp"

namespace opkit::attention {
namespace {

inline void transpose_eight(const uint32_t* rows, int64_t pitch, uint32_t* out, int64_t out_pitch) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + i * pitch));
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(reinterpret_cast<float*>(out + i * out_pitch), _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(reinterpret_cast<float*>(out + (i + 4) * out_pitch), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
}

inline void transposed_avx2(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
    const int64_t whole_keys = keys / 8 * 8, whole_words = words / 8 * 8;
    for (int64_t key = 0; key < whole_keys; key += 8)
        for (int64_t word = 0; word < whole_words; word += 8)
            transpose_eight(rows + key * pitch + word, pitch, out + word * out_pitch + key, out_pitch);
    transpose_part(rows, pitch, whole_keys, keys, 0, whole_words, out, out_pitch);
    transpose_part(rows, pitch, 0, keys, whole_words, words, out, out_pitch);
}

inline void transpose_words_avx2(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out) {
    transposed_avx2(rows, pitch, keys, words, out, kKeys);
}

struct Avx2Transpose {
    static void transposed(const uint32_t* rows, int64_t pitch, int64_t keys, int64_t words, uint32_t* out, int64_t out_pitch) {
        transposed_avx2(rows, pitch, keys, words, out, out_pitch);
    }
};

}  // namespace
}  // namespace opkit::attention
