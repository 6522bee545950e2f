// What the kernels of products compute in a call.
//
// A packed weight is panels of kPanel columns, the last padded with zeros: packed[panel][depth][kPanel]. It is the same for all
// ISAs, so that a file holds one.
#pragma once

#include <stdint.h>

namespace opkit::product {

enum Activation : int32_t { kNone = 0, kRelu = 1 };

constexpr int64_t kPanel = 16;

// y[rows][columns] = x[rows][taps][depth] w: a part of the depth of a product. The first part adds bias and addend, the others y; the
// last applies the activation. addend and y are stored by rows, a pitch apart.
//
// x is stored by rows of one tap, or `places` says where each tap of a row is. Rows of a line are next to each other; places of a line
// are null where a tap has only zeros.
struct Block {
    const float* x;
    const float* const* places;  // [taps][rows], or null
    const float* panels;  // of the first column, at the first depth
    const float* bias;    // or null
    const float* addend;  // or null; it may be y
    float* y;
    int64_t x_pitch, panel_pitch, addend_pitch, y_pitch;
    int64_t rows, line, columns, taps, depth;
    bool first, last;
    Activation activation;
};

// A row of pixels of a convolution in which each channel has its own image and kernel. Channels are next to each other; a packed
// weight is panels of channels by taps.
struct DepthwiseRow {
    const float* x;       // the row of the image that the tap `first_row` reads
    const float* packed;
    const float* bias;    // or null
    const float* addend;  // or null
    float* y;
    int64_t channels, width, out_width;
    int64_t row_pitch;                  // of x, between rows of taps
    int64_t first_row, rows;            // of taps that are inside of the image
    int64_t kernel_height, kernel_width, stride, padding, dilation;
    Activation activation;
};

}  // namespace opkit::product
