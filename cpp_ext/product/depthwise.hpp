// The kernel of convolutions in which each channel has its own image and kernel. V is as in tiles.hpp.
#pragma once

#include "tiles.hpp"

namespace opkit::product {
namespace {

template <class V>
void depthwise(const DepthwiseRow& row) {
    const int64_t taps = row.kernel_height * row.kernel_width, whole = row.channels / V::kLanes * V::kLanes;
    for (int64_t pixel = 0; pixel < row.out_width; ++pixel) {
        const int64_t left = pixel * row.stride - row.padding;  // of the first tap
        const int64_t first = left < 0 ? (-left + row.dilation - 1) / row.dilation : 0;
        const int64_t inside = left < row.width ? (row.width - 1 - left) / row.dilation + 1 : 0;
        const int64_t last = inside < row.kernel_width ? inside : row.kernel_width;
        const int64_t out = pixel * row.channels;
        for (int64_t channel = 0; channel < row.channels;) {
            const float* x = row.x + left * row.channels + channel;
            const float* w = row.packed + channel / kPanel * taps * kPanel + channel % kPanel;
            if (channel < whole) {
                typename V::Floats sum = row.bias ? V::load(row.bias + channel) : V::zero();
                for (int64_t i = 0; i < row.rows; ++i)
                    for (int64_t j = first; j < last; ++j)
                        sum = V::fma(V::load(x + i * row.row_pitch + j * row.dilation * row.channels),
                                     V::load(w + ((row.first_row + i) * row.kernel_width + j) * kPanel), sum);
                if (row.addend) sum = V::plus(sum, V::load(row.addend + out + channel));
                V::store(row.y + out + channel, row.activation == kRelu ? V::positive(sum) : sum);
                channel += V::kLanes;
            } else {
                float sum = row.bias ? row.bias[channel] : 0.0f;
                for (int64_t i = 0; i < row.rows; ++i)
                    for (int64_t j = first; j < last; ++j)
                        sum += x[i * row.row_pitch + j * row.dilation * row.channels] *
                               w[((row.first_row + i) * row.kernel_width + j) * kPanel];
                if (row.addend) sum += row.addend[out + channel];
                row.y[out + channel] = row.activation == kRelu ? positive(sum) : sum;
                ++channel;
            }
        }
    }
}

}  // namespace
}  // namespace opkit::product
