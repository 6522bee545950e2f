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

// Convolutions by Winograd's method (winograd.cpp). A tile has tile x tile results and (tile + 2) x (tile + 2) points; tile is 2 or 4.

// Of the larger tiles' points, besides 0 and infinity: a, -a, b and -b. With 5/8 and 3/2 results err by half as much as with the usual
// 1 and 2, and all coefficients of the transforms are float32 numbers.
constexpr float kPointA = 0.625f, kPointB = 1.5f;

// Pixels of tiles to values at points. The channels are whole panels.
struct WinogradInput {
    const float* const* pixels;  // [tiles][points]: where the channels of each pixel are
    float* points;               // [points][tiles][channels]; pitches are between tiles and between points
    int64_t tiles, channels, pitch, point_pitch, tile;
};

// Sums at points to results; the columns are whole panels. Adds to `checks` of a tile what is NaN if a result, before bias and addend,
// is not finite.
struct WinogradOutput {
    const float* sums;      // [points][tiles][columns]
    const int64_t* places;  // [tiles][results]: where in y and addend; negative outside of the image
    const float* bias;      // or null
    const float* addend;    // or null
    float* y;
    float* checks;  // [tiles][kPanel]
    int64_t tiles, columns, pitch, point_pitch, tile;
    Activation activation;
};

}  // namespace opkit::product
