// Rows of tensors to what kernels read: as keys (transposed), as values (rows of words), in float32 or pairs of bf16 (block.hpp).
#pragma once

#include <cstdint>

#include "../isa/table.hpp"
#include "bias.hpp"

namespace opkit::attention {

// (batch, heads, sequence, head); elements of a row lie next to each other, the other strides are any, in elements.
struct Operand {
    const void* data;
    int64_t stride[3];
    Type type;
};

// Some rows of one head.
struct Rows {
    const char* data;
    int64_t stride, count, elements;
    Type type;
};

Rows rows_of(const Operand& operand, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t elements);

constexpr int64_t kWidest = 16;  // words of the widest vector

// Whether bf16 stays in pairs; an ISA without instructions for them reads it in float32, as float16.
inline bool is_paired(const isa::Table& kernels, Type type) { return type == Type::Brain && kernels.pair_rows > 0; }
inline int64_t words_of_row(bool paired, int64_t elements) { return paired ? (elements + 1) / 2 : elements; }
inline int64_t padded_columns(int64_t elements) { return rounded_up(elements, kWidest); }

// Words of a tile of keys, and of `rows` rows as values.
inline int64_t key_words(bool paired, int64_t elements) {
    const int64_t words = words_of_row(paired, elements);
    return kKeys * (paired ? rounded_up(words, kWidest) : words);
}
inline int64_t value_words(bool paired, int64_t elements, int64_t rows = kKeys) {
    return words_of_row(paired, rows) * padded_columns(elements);
}

// At most kKeys rows to a tile; missing keys are zero.
void pack_keys(const isa::Table& kernels, const Rows& rows, uint32_t* out);

// Rows, of which `room` have place, to values; what is missing is zero. Elements that are no finite numbers too, if `clean`.
void pack_values(const isa::Table& kernels, const Rows& rows, int64_t room, bool clean, uint32_t* out);

bool any_unclean(const uint32_t* words, int64_t n, bool paired);

// A row in float32.
void widen_row(const char* row, Type type, int64_t n, float* out);

// Rows that kernels read in float32, in `copy`, if they have fewer bits; others as they are.
Rows widened(const isa::Table& kernels, const Rows& rows, float* copy);

// One float32 row to a tensor's.
void write_row(const isa::Table& kernels, const float* row, int64_t n, Type type, void* out);

}  // namespace opkit::attention
