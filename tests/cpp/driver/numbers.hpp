// Elements of tensors, read and made without any code that is checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checks.hpp"

namespace opkit::driver {

enum class Kind { F32, Bf16, F16, I8, F8 };

int64_t size_of(Kind kind);
const char* name_of(Kind kind);

// The value of an element.
double value_at(Kind kind, const unsigned char* at);

// An element near a random normal number (any number of int8), exact in its kind.
void put_random(Kind kind, Random& random, unsigned char* at);

// The element nearest to a float, ties to even; NaN is the positive quiet one.
uint16_t rounded_to_bf16(float value);
uint16_t rounded_to_half(float value);

// (batch, heads, rows, columns) in memory of its own size, with rows `gap` elements apart and heads inside of rows, or outside.
// What lies between rows has all bits set, which is NaN of each kind of float.
struct Tensor {
    Tensor(Kind kind, int64_t batch, int64_t heads, int64_t rows, int64_t columns, bool out_is_bshd, int64_t gap);
    void fill(Random& random);
    unsigned char* at(int64_t b, int64_t h, int64_t i) {
        return bytes.data() + (b * stride[0] + h * stride[1] + i * stride[2]) * size_of(kind);
    }
    double value(int64_t b, int64_t h, int64_t i, int64_t c) { return value_at(kind, at(b, h, i) + c * size_of(kind)); }
    void poison(int64_t b, int64_t h, int64_t i);  // a row becomes NaN
    bool gaps_kept();                              // whether nothing was written between rows

    Kind kind;
    int64_t sizes[4], stride[3];
    std::vector<unsigned char> bytes;
};

}  // namespace opkit::driver
