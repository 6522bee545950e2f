// Products and convolutions of float32 for CPUs, with weights that are packed beforehand. Needs neither torch nor Python.
//
// Every size may be zero. Sums are accumulated in float32, over at most kMaxSum numbers at once. Scratch memory belongs to the
// threads; std::bad_alloc may be thrown, also by the bodies that Parallel runs.
#pragma once

#include <cstdint>

#include "../isa/dispatch.hpp"
#include "block.hpp"

namespace opkit::product {

// Runs body(begin, end, context) over parts of [0, n) in parallel, as torch's parallel_for does.
struct Parallel {
    void (*run)(void* self, int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
    int32_t threads;
    void* self;
};

// The kernels of the widest ISA that runs here.
const isa::Table& widest();

// ---- products ----

// y[rows][columns] = activation(x[rows][depth] w[columns][depth]^T + bias[columns] + addend[rows][columns]); y may be addend.
struct Linear {
    const float* x;
    int64_t x_pitch;
    const float* packed;
    const float* bias;    // or null
    const float* addend;  // or null
    int64_t addend_pitch;
    float* y;
    int64_t y_pitch;
    int64_t rows, columns, depth;
    Activation activation;
};

// How many floats a packed weight has.
int64_t packed_floats(int64_t columns, int64_t depth);

// Packs a weight, whose element (column, depth) is at w[column * column_stride + depth * depth_stride].
void pack(const float* w, int64_t column_stride, int64_t depth_stride, int64_t columns, int64_t depth, float* packed);

void linear(const Linear& call, const Parallel& parallel, const isa::Table& kernels = widest());

// Products of matrices that are not packed: y[n] = a[n] b[n] + bias + addend[n]. A stride of 0 repeats a matrix.
struct Matmul {
    const float* a;
    int64_t a_batch, a_row, a_depth;
    const float* b;
    int64_t b_batch, b_depth, b_column;
    const float* bias;    // [columns], or null
    const float* addend;  // or null
    int64_t addend_batch, addend_pitch;
    float* y;
    int64_t y_batch, y_pitch;
    int64_t batch, rows, columns, depth;
};

void matmul(const Matmul& call, const Parallel& parallel, const isa::Table& kernels = widest());

inline void matmul(const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_depth, int64_t b_column, float* y,
                   int64_t y_pitch, int64_t rows, int64_t columns, int64_t depth, const float* bias, const float* addend,
                   int64_t addend_pitch, const Parallel& parallel) {
    matmul({a, 0, a_row, a_depth, b, 0, b_depth, b_column, bias, addend, 0, addend_pitch, y, 0, y_pitch, 1, rows, columns, depth},
           parallel);
}

// ---- convolutions of images ----

// Where the elements of a weight are: strides of out_channels, in_channels and taps, which may be negative.
struct Taps {
    const float* w;
    int64_t out, in, down, right;
};

struct Convolution {
    const float* x;
    float* y;
    const float* packed;
    const float* bias;    // [out_channels], or null
    const float* addend;  // like y, or null; it is not y
    int64_t batch, in_channels, height, width, out_channels, out_height, out_width;
    int64_t kernel[2], stride[2], padding[2], dilation[2], groups;
    Activation activation;
    int64_t tile;        // 2 or 4: by Winograd's method, with tiles of so many rows; 0: by the direct one
    bool channels_last;  // of x, y and addend: [batch][height][width][channels], else [batch][channels][height][width]
    const Taps* weight = nullptr;  // that was packed for Winograd's method, or null
};

int64_t packed_convolution_floats(int64_t out_channels, int64_t in_per_group, int64_t kernel_height, int64_t kernel_width,
                                  int64_t groups);

// Packs a weight [out_channels][in_per_group][kernel_height][kernel_width].
void pack_convolution(const float* w, int64_t out_channels, int64_t in_per_group, int64_t kernel_height, int64_t kernel_width,
                      int64_t groups, float* packed);

// The same for Winograd's method (winograd.cpp): of weights [out_channels][in_channels][3][3] of convolutions without stride, dilation
// and groups. Both numbers of channels are multiples of kPanel, and so many numbers may be summed at once.
int64_t packed_winograd_floats(int64_t out_channels, int64_t in_channels, int64_t tile);

// Returns whether all weights are so small that their sums at points are finite.
bool pack_winograd(const Taps& w, int64_t out_channels, int64_t in_channels, int64_t tile, float* packed, const Parallel& parallel);

inline void pack_winograd(const float* w, int64_t out_channels, int64_t in_channels, int64_t tile, float* packed) {
    pack_winograd({w, in_channels * 9, 9, 3, 1}, out_channels, in_channels, tile, packed, {nullptr, 1, nullptr});
}

// Packs the weight and computes the convolution of images that are channels-last; false if that weight is too large, or NaN.
bool winograd(Convolution call, const Taps& w, const Parallel& parallel, const isa::Table& kernels);

// Images that are not channels-last are converted, and so is the result.
void convolution(const Convolution& call, const Parallel& parallel, const isa::Table& kernels = widest());

// Converts images [batch][rows][columns] to [batch][columns][rows].
void transpose(const float* x, int64_t batch, int64_t rows, int64_t columns, float* y, const Parallel& parallel);

}  // namespace opkit::product
