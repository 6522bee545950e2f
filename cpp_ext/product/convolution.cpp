#include <algorithm>
#include <cstring>
#include <memory>

#include "blocked.hpp"

namespace opkit::product {
namespace {

// The parts of a row of taps that are inside of an image.
struct Inside {
    Inside(int64_t origin, int64_t size, int64_t kernel, int64_t dilation)
        : begin(origin < 0 ? std::min(kernel, (-origin + dilation - 1) / dilation) : 0),
          end(origin < size ? std::max(begin, std::min(kernel, (size - 1 - origin) / dilation + 1)) : begin) {}
    int64_t begin, end;
};

constexpr int64_t kMinChannels = 16;  // of taps that are worth finding, one by one

// Copies `count` floats for each of so many pixels, which are `step` apart, to rows that are `pitch` apart.
void copy_runs(const float* from, int64_t step, int64_t count, int64_t pixels, float* to, int64_t pitch) {
    for (int64_t i = 0; i < pixels; ++i, from += step, to += pitch) {
        if (count >= 64) {
            std::memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
        } else if (count >= 4) {
            for (int64_t n = 0; n < count - 4; n += 4) std::memcpy(to + n, from + n, 16);
            std::memcpy(to + count - 4, from + count - 4, 16);
        } else {
            for (int64_t n = 0; n < count; ++n) to[n] = from[n];
        }
    }
}

// Numbers [first, last) of a run of what each pixel is computed from; a run is taps of one row that are next to each other.
struct Run {
    Run(const Convolution& call, int64_t at, int64_t end) {
        channels = call.in_channels / call.groups;
        const bool dense = call.dilation[1] == 1 && call.groups == 1;
        taps = dense ? call.kernel[1] : 1;
        const int64_t number = at / (taps * channels);
        down = number * taps / call.kernel[1] * call.dilation[0];
        right = number * taps % call.kernel[1] * call.dilation[1];
        first = at % (taps * channels);
        last = std::min(taps * channels, first + end - at);
    }
    int64_t channels, taps, down, right, first, last;
};

// Copies a run for pixels of one row, of which the first is at x.
void copy_line(const Convolution& call, const Run& run, const float* line, int64_t x, int64_t pixels, float* out, int64_t pitch) {
    const int64_t step = call.stride[1], count = run.last - run.first;
    int64_t left = x * step - call.padding[1] + run.right;  // of the run's first tap
    while (pixels > 0) {
        const int64_t whole = left < 0 ? 0 : std::clamp<int64_t>((call.width - run.taps - left + step) / step, 0, pixels);
        copy_runs(line + left * call.in_channels + run.first, step * call.in_channels, count, whole, out, pitch);
        pixels -= whole;
        left += whole * step;
        out += whole * pitch;
        if (pixels == 0) return;
        const int64_t begin = std::clamp(-left * run.channels, run.first, run.last);
        const int64_t end = std::clamp((call.width - left) * run.channels, begin, run.last);
        std::fill_n(out, count, 0.0f);
        if (begin < end) std::copy_n(line + left * call.in_channels + begin, end - begin, out + begin - run.first);
        --pixels;
        left += step;
        out += pitch;
    }
}

// Copies what pixels are computed from, as rows of a matrix: [kernel_height][kernel_width][channels of a group].
void copy_pixels(const void* context, int64_t group, int64_t row, int64_t rows, int64_t begin, int64_t end, float* out, int64_t pitch) {
    const Convolution& call = *static_cast<const Convolution*>(context);
    const int64_t width = call.out_width;
    for (int64_t at = begin; at < end;) {
        const Run run(call, at, end);
        for (int64_t i = 0; i < rows;) {
            const int64_t x = (row + i) % width, line = (row + i) / width, pixels = std::min(rows - i, width - x);
            const int64_t down = line % call.out_height * call.stride[0] - call.padding[0] + run.down;
            float* to = out + i * pitch + at - begin;
            if (down >= 0 && down < call.height) {
                const int64_t from = (line / call.out_height * call.height + down) * call.width * call.in_channels;
                copy_line(call, run, call.x + from + group * run.channels, x, pixels, to, pitch);
            } else {
                for (int64_t n = 0; n < pixels; ++n) std::fill_n(to + n * pitch, run.last - run.first, 0.0f);
            }
            i += pixels;
        }
        at += run.last - run.first;
    }
}

// Finds the taps that pixels of whole rows are computed from.
void find_taps(const void* context, int64_t group, int64_t row, int64_t rows, int64_t begin, int64_t end, const float** out,
               const float* zeros) {
    const Convolution& call = *static_cast<const Convolution*>(context);
    const float* images = call.x + group * (call.in_channels / call.groups);
    for (int64_t tap = begin; tap < end; ++tap)
        for (int64_t line = row / call.out_width; line < (row + rows) / call.out_width; ++line) {
            const int64_t y = line % call.out_height * call.stride[0] - call.padding[0] + tap / call.kernel[1] * call.dilation[0];
            const int64_t right = tap % call.kernel[1] * call.dilation[1] - call.padding[1];
            const float* from = images + (line / call.out_height * call.height + y) * call.width * call.in_channels;
            for (int64_t pixel = 0; pixel < call.out_width; ++pixel) {
                const int64_t x = pixel * call.stride[1] + right;
                const float* place = x < 0 || x >= call.width ? zeros : from + x * call.in_channels;
                *out++ = y < 0 || y >= call.height ? nullptr : place;
            }
        }
}

bool is_depthwise(const Convolution& call) {
    return call.groups > 1 && call.in_channels == call.groups && call.out_channels == call.groups;
}

void depthwise(const Convolution& call, const Parallel& parallel, const isa::Table& kernels) {
    const int64_t lines = call.batch * call.out_height, line = call.out_width * call.out_channels;
    const int64_t tasks = std::min(lines, int64_t{parallel.threads} * 8);
    deal(parallel, tasks, [&](int64_t task) {
        for (int64_t n = lines * task / tasks; n < lines * (task + 1) / tasks; ++n) {
            const int64_t top = n % call.out_height * call.stride[0] - call.padding[0];
            const Inside down(top, call.height, call.kernel[0], call.dilation[0]);
            const int64_t first = n / call.out_height * call.height + top + down.begin * call.dilation[0];
            kernels.depthwise_f32({call.x + first * call.width * call.in_channels, call.packed, call.bias,
                                   call.addend ? call.addend + n * line : nullptr, call.y + n * line, call.out_channels, call.width,
                                   call.out_width, call.dilation[0] * call.width * call.in_channels, down.begin,
                                   down.end - down.begin, call.kernel[0], call.kernel[1], call.stride[1], call.padding[1],
                                   call.dilation[1], call.activation});
        }
    });
}

void channels_last(const Convolution& call, const Parallel& parallel, const isa::Table& kernels) {
    if (call.tile) return winograd(call, parallel, kernels);
    if (is_depthwise(call)) return depthwise(call, parallel, kernels);
    const int64_t channels = call.in_channels / call.groups, columns = call.out_channels / call.groups;
    const int64_t taps = call.kernel[0] * call.kernel[1], pixels = call.batch * call.out_height * call.out_width;
    const bool plain = taps == 1 && call.stride[0] * call.stride[1] == 1 && call.padding[0] == 0 && call.padding[1] == 0;
    const bool copied = !plain && (taps == 1 || channels < kMinChannels);
    multiply({call.x, call.packed, call.bias, call.addend, call.y, call.in_channels, call.out_channels, call.out_channels, channels,
              packed_floats(columns, taps * channels), columns, columns, columns, call.groups, pixels, call.out_width, columns,
              copied ? 1 : taps, copied ? taps * channels : channels, call.activation, copied ? copy_pixels : nullptr,
              plain || copied ? nullptr : find_taps, &call},
             parallel, kernels);
}

}  // namespace

int64_t packed_convolution_floats(int64_t out_channels, int64_t in_per_group, int64_t kernel_height, int64_t kernel_width,
                                  int64_t groups) {
    const int64_t taps = kernel_height * kernel_width;
    if (groups > 1 && in_per_group == 1 && out_channels == groups) return packed_floats(out_channels, taps);
    return groups * packed_floats(groups ? out_channels / groups : 0, in_per_group * taps);
}

void pack_convolution(const float* w, int64_t out_channels, int64_t in_per_group, int64_t kernel_height, int64_t kernel_width,
                      int64_t groups, float* packed) {
    const int64_t taps = kernel_height * kernel_width, depth = in_per_group * taps;
    if (groups > 1 && in_per_group == 1 && out_channels == groups) return pack(w, taps, 1, out_channels, taps, packed);
    const int64_t columns = out_channels / groups;
    const Memory reordered(columns * depth);  // [columns][taps][in_per_group]
    for (int64_t group = 0; group < groups; ++group, w += columns * depth, packed += packed_floats(columns, depth)) {
        for (int64_t column = 0; column < columns; ++column)
            for (int64_t tap = 0; tap < taps; ++tap)
                for (int64_t channel = 0; channel < in_per_group; ++channel)
                    reordered.data()[(column * taps + tap) * in_per_group + channel] = w[(column * in_per_group + channel) * taps + tap];
        pack(reordered.data(), depth, 1, columns, depth, packed);
    }
}

void convolution(const Convolution& call, const Parallel& parallel, const isa::Table& kernels) {
    const int64_t pixels = call.out_height * call.out_width, images = call.height * call.width;
    if (call.batch * call.out_channels * pixels == 0) return;
    if (call.channels_last) return channels_last(call, parallel, kernels);
    const int64_t results = call.batch * call.out_channels * pixels;
    const Memory x(call.batch * call.in_channels * images), y(results), addend(call.addend ? results : 0);
    transpose(call.x, call.batch, call.in_channels, images, x.data(), parallel);
    if (call.addend) transpose(call.addend, call.batch, call.out_channels, pixels, addend.data(), parallel);
    Convolution converted = call;
    converted.x = x.data();
    converted.y = y.data();
    converted.addend = call.addend ? addend.data() : nullptr;
    channels_last(converted, parallel, kernels);
    transpose(y.data(), call.batch, pixels, call.out_channels, call.y, parallel);
}

void transpose(const float* x, int64_t batch, int64_t rows, int64_t columns, float* y, const Parallel& parallel) {
    constexpr int64_t kColumns = 64;
    const int64_t parts = (columns + kColumns - 1) / kColumns;
    const Parallel workers{parallel.run, batch * rows * columns < (1 << 14) ? 1 : parallel.threads, parallel.self};
    deal(workers, batch * parts, [&](int64_t task) {
        const int64_t image = task / parts * rows * columns, column = task % parts * kColumns;
        transpose_rows(x + image + column, columns, rows, std::min(kColumns, columns - column), y + image + column * rows, rows);
    });
}

}  // namespace opkit::product
