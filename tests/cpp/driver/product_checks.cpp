// Products and convolutions with packed weights: every ISA that runs here, against double. Operands fill their memory, so that reading
// beyond them is out of bounds.
#include <cmath>
#include <limits>
#include <vector>

#include "../../../cpp_ext/product/product.hpp"
#include "../../../cpp_ext/runtime/parallel.hpp"
#include "numbers.hpp"

namespace opkit::driver {
namespace {

using product::Parallel;
using Floats = std::vector<float>;

void run(void*, int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
    parallel_for(0, n, grain, body, context);
}

Parallel workers() { return {run, threads, nullptr}; }

Floats randoms(int64_t count, Random& random) {
    Floats found(static_cast<size_t>(count));
    for (float& each : found) each = static_cast<float>(random.normal());
    return found;
}

float at(const Floats& values, int64_t index) { return values[static_cast<size_t>(index)]; }

bool near(float found, double wanted, int64_t depth, double bound = 2e-6) {
    return std::abs(found - wanted) <= bound * std::sqrt(static_cast<double>(depth + 1)) * (1 + std::abs(wanted));
}

void check_linear(const isa::Choice& choice, int64_t rows, int64_t columns, int64_t depth, Checks& checks) {
    Random random(static_cast<uint64_t>(rows * 10000 + columns * 100 + depth));
    const int64_t x_pitch = depth + 3, y_pitch = columns + 2;
    const Floats x = randoms(rows ? (rows - 1) * x_pitch + depth : 0, random), w = randoms(columns * depth, random);
    const Floats bias = randoms(columns, random), addend = randoms(rows * columns, random);
    Floats packed(static_cast<size_t>(product::packed_floats(columns, depth)));
    product::pack(w.data(), 1, columns, columns, depth, packed.data());
    const float gap = 12345.0f;
    Floats y(static_cast<size_t>(rows ? (rows - 1) * y_pitch + columns : 0), gap);
    product::linear({x.data(), x_pitch, packed.data(), bias.data(), addend.data(), columns, y.data(), y_pitch, rows, columns, depth,
                     product::kRelu},
                    workers(), choice.kernels);
    bool good = true;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < y_pitch && i * y_pitch + j < static_cast<int64_t>(y.size()); ++j) {
            if (j >= columns) {
                good &= at(y, i * y_pitch + j) == gap;
                continue;
            }
            double wanted = double{at(bias, j)} + at(addend, i * columns + j);
            for (int64_t k = 0; k < depth; ++k) wanted += double{at(x, i * x_pitch + k)} * at(w, k * columns + j);
            good &= near(at(y, i * y_pitch + j), wanted > 0 ? wanted : 0, depth);
        }
    checks.expect(good, choice.cap + ": linear rows=" + std::to_string(rows) + " columns=" + std::to_string(columns) +
                            " depth=" + std::to_string(depth));
}

// Batches whose matrices have any strides; `turned` operands have their rows along the depth.
void check_matmul(const isa::Choice& choice, int64_t rows, int64_t columns, int64_t depth, bool turned, Checks& checks) {
    constexpr int64_t kBatch = 3;
    Random random(static_cast<uint64_t>(rows * 10000 + columns * 100 + depth));
    const Floats a = randoms(kBatch * rows * depth, random), b = randoms(columns * depth, random);
    const Floats bias = randoms(columns, random);
    Floats y(static_cast<size_t>(kBatch * rows * columns), 1.0f);
    const int64_t a_row = turned ? 1 : depth, a_depth = turned ? rows : 1, b_depth = turned ? 1 : columns, b_column = turned ? depth : 1;
    product::matmul({a.data(), rows * depth, a_row, a_depth, b.data(), 0, b_depth, b_column, bias.data(), y.data(), rows * columns,
                     columns, y.data(), rows * columns, columns, kBatch, rows, columns, depth},
                    workers(), choice.kernels);
    bool good = true;
    for (int64_t n = 0; n < kBatch; ++n)
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) {
                double wanted = 1.0 + at(bias, j);
                for (int64_t k = 0; k < depth; ++k)
                    wanted += double{at(a, n * rows * depth + i * a_row + k * a_depth)} * at(b, k * b_depth + j * b_column);
                good &= near(at(y, (n * rows + i) * columns + j), wanted, depth);
            }
    checks.expect(good, choice.cap + ": matmul rows=" + std::to_string(rows) + " columns=" + std::to_string(columns) +
                            " depth=" + std::to_string(depth) + (turned ? " turned" : ""));
}

// Where an element of images is.
struct Images {
    int64_t channels, height, width;
    bool channels_last;
    int64_t at(int64_t n, int64_t c, int64_t y, int64_t x) const {
        return channels_last ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
    }
};

void check_convolution(const isa::Choice& choice, product::Convolution call, Checks& checks) {
    Random random(static_cast<uint64_t>(call.in_channels * 100 + call.out_channels));
    const auto out = [&](int d, int64_t size) {
        return (size + 2 * call.padding[d] - call.dilation[d] * (call.kernel[d] - 1) - 1) / call.stride[d] + 1;
    };
    call.out_height = out(0, call.height);
    call.out_width = out(1, call.width);
    const int64_t each = call.in_channels / call.groups, taps = call.kernel[0] * call.kernel[1], pixels = call.out_height * call.out_width;
    const Images in{call.in_channels, call.height, call.width, call.channels_last};
    const Images result{call.out_channels, call.out_height, call.out_width, call.channels_last};
    const Floats x = randoms(call.batch * call.in_channels * call.height * call.width, random);
    const Floats w = randoms(call.out_channels * each * taps, random), bias = randoms(call.out_channels, random);
    Floats packed(static_cast<size_t>(
        call.tile ? product::packed_winograd_floats(call.out_channels, each, call.tile)
                  : product::packed_convolution_floats(call.out_channels, each, call.kernel[0], call.kernel[1], call.groups)));
    if (call.tile)
        product::pack_winograd(w.data(), call.out_channels, each, call.tile, packed.data());
    else
        product::pack_convolution(w.data(), call.out_channels, each, call.kernel[0], call.kernel[1], call.groups, packed.data());
    const Floats addend = randoms(call.batch * call.out_channels * pixels, random);
    Floats y(addend.size());
    call.x = x.data();
    call.y = y.data();
    call.packed = packed.data();
    call.bias = bias.data();
    call.addend = addend.data();
    product::convolution(call, workers(), choice.kernels);
    bool good = true;
    for (int64_t n = 0; n < call.batch; ++n)
        for (int64_t c = 0; c < call.out_channels; ++c)
            for (int64_t pixel = 0; pixel < pixels; ++pixel) {
                const int64_t i = pixel / call.out_width, j = pixel % call.out_width, place = result.at(n, c, i, j);
                double wanted = double{at(bias, c)} + at(addend, place);
                for (int64_t k = 0; k < each * taps; ++k) {
                    const int64_t channel = c / (call.out_channels / call.groups) * each + k / taps;
                    const int64_t row = i * call.stride[0] - call.padding[0] + k % taps / call.kernel[1] * call.dilation[0];
                    const int64_t column = j * call.stride[1] - call.padding[1] + k % call.kernel[1] * call.dilation[1];
                    if (row >= 0 && row < call.height && column >= 0 && column < call.width)
                        wanted += double{at(x, in.at(n, channel, row, column))} * at(w, c * each * taps + k);
                }
                good &= near(at(y, place), wanted > 0 ? wanted : 0, each * taps, call.tile == 4 ? 6e-6 : 2e-6);
            }
    checks.expect(good, choice.cap + ": convolution of " + std::to_string(call.in_channels) + " channels to " +
                            std::to_string(call.out_channels) + (call.channels_last ? ", channels last" : ""));
}

void check_products_of(const isa::Choice& choice, Checks& checks) {
    for (int64_t rows : {0, 1, 2, 5, 13, 31})
        for (int64_t columns : {0, 1, 16, 33, 70})
            for (int64_t depth : {0, 1, 4, 7, 40}) check_linear(choice, rows, columns, depth, checks);
    check_linear(choice, 20, 40, 1024 - 3, checks);  // rows whose distance is a power of two
    check_linear(choice, 150, 200, 1601, checks);
    for (bool turned : {false, true}) {
        check_matmul(choice, 7, 19, 5, turned, checks);
        check_matmul(choice, 30, 150, 33, turned, checks);
        check_matmul(choice, 0, 3, 3, turned, checks);
    }
    for (bool last : {false, true}) {
        const auto kRelu = product::kRelu;
        for (const product::Convolution& call : std::initializer_list<product::Convolution>{
                 {{}, {}, {}, {}, {}, 2, 5, 6, 7, 18, 0, 0, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 1, kRelu, 0, last},
                 {{}, {}, {}, {}, {}, 1, 3, 15, 12, 17, 0, 0, {7, 5}, {2, 2}, {3, 3}, {1, 1}, 1, kRelu, 0, last},
                 {{}, {}, {}, {}, {}, 1, 20, 5, 9, 33, 0, 0, {1, 1}, {1, 1}, {0, 0}, {1, 1}, 1, kRelu, 0, last},
                 {{}, {}, {}, {}, {}, 1, 4, 9, 8, 6, 0, 0, {2, 3}, {1, 2}, {2, 3}, {3, 2}, 2, kRelu, 0, last},
                 {{}, {}, {}, {}, {}, 2, 21, 6, 5, 21, 0, 0, {3, 3}, {2, 1}, {1, 1}, {1, 1}, 21, kRelu, 0, last},
                 {{}, {}, {}, {}, {}, 1, 200, 4, 4, 9, 0, 0, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 1, kRelu, 0, last},
                 {{}, {}, {}, {}, {}, 2, 16, 9, 7, 48, 0, 0, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 1, kRelu, 2, last},
                 {{}, {}, {}, {}, {}, 3, 32, 6, 13, 16, 0, 0, {3, 3}, {1, 1}, {0, 2}, {1, 1}, 1, kRelu, 4, last},
                 {{}, {}, {}, {}, {}, 1, 16, 30, 31, 80, 0, 0, {3, 3}, {1, 1}, {1, 1}, {1, 1}, 1, kRelu, 4, last}})
            check_convolution(choice, call, checks);
    }
}

}  // namespace

void check_products(const Isas& isas, Checks& checks) {
    for (int32_t count : {1, 3}) {
        threads = count;
        for (const isa::Choice* choice : isas) check_products_of(*choice, checks);
    }
    threads = 1;
}

}  // namespace opkit::driver
