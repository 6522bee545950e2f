// Convolutions of 3 x 3 taps with fewer multiplications: Winograd's minimal filtering, as by Lavin and Gray (arXiv:1509.09308).
//
// A tile of results is a linear function of the pixels that it is computed from. Pixels and weights are transformed to values at points,
// whose products are summed over the channels, a product of matrices for each point, and the sums are transformed to results. A tile of
// 2 x 2 takes 16 multiplications for each pair of channels in place of 36, and one of 4 x 4 takes 36 in place of 144. Next to float64,
// results err as much as those of the direct method with the smaller tiles, and two to three times as much with the larger.
//
// A number that is not finite, or that becomes so at a point, spoils all results of a tile. Images with such results are computed again
// by the direct method, with the weights, or with those that are recovered from their values at points.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "blocked.hpp"

namespace opkit::product {
namespace {

constexpr int64_t kTaps = 3;
constexpr float kMaxTap = 1e30f;
constexpr int64_t kColumns = 2 * kPanel;  // of a group: its sums at all points are transformed at once
constexpr int64_t kMaxFloats = 170000;    // of a task's points and sums: they stay in a second-level cache of 1 MiB
constexpr int64_t kMinTiles = 24;         // of a task even so, if there are as many: each reads all weights
constexpr int64_t kGap = 16;              // floats between rows, so that they are not in the same set of a cache

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t point_count(int64_t tile) { return (tile + 2) * (tile + 2); }

// The values at points of a line of taps, a row for each point; and the taps from the values. `Matrix` has six rows or columns at most.
using Matrix = double[6][6];

const Matrix& weights_to_points(int64_t tile) {
    constexpr double a = kPointA, b = kPointB, p = 2 * a * a * (a * a - b * b), q = 2 * b * b * (b * b - a * a), ab = a * a * b * b;
    static constexpr Matrix kSmall{{1}, {0.5, 0.5, 0.5}, {0.5, -0.5, 0.5}, {0, 0, 1}};
    static constexpr Matrix kLarge{{1 / ab}, {1 / p, a / p, a * a / p}, {1 / p, -a / p, a * a / p}, {1 / q, b / q, b * b / q},
                                   {1 / q, -b / q, b * b / q}, {0, 0, 1}};
    return tile == 2 ? kSmall : kLarge;
}

const Matrix& points_to_weights(int64_t tile) {
    constexpr double a = kPointA, b = kPointB, p = a * (a * a - b * b), ab = a * a * b * b;
    static constexpr Matrix kSmall{{1}, {0, 1, -1}, {0, 0, 0, 1}};
    static constexpr Matrix kLarge{{ab}, {0, p, -p}, {0, 0, 0, 0, 0, 1}};
    return tile == 2 ? kSmall : kLarge;
}

// How tiles, and groups of columns, are shared out to tasks.
struct Plan {
    Plan(const Convolution& call, int64_t threads)
        : across(divided_up(call.out_width, call.tile)), in_image(divided_up(call.out_height, call.tile) * across),
          tiles(call.batch * in_image), points(point_count(call.tile)), pitch(call.in_channels + kGap),
          groups(divided_up(call.out_channels, kColumns)) {
        const int64_t largest = std::max(kMinTiles, kMaxFloats / (points * (pitch + kColumns)));
        int64_t best = std::numeric_limits<int64_t>::max();
        for (int64_t m = 1; m <= std::min(groups, threads); ++m) {
            const int64_t rounds = divided_up(divided_up(tiles, largest) * m, threads), n = std::min(tiles, rounds * threads / m);
            // A group takes four times as long as the transform of the input, which each task does, and reading weights as long as four
            // tiles.
            const int64_t cost = rounds * (divided_up(tiles, n) + 4) * (1 + 4 * divided_up(groups, m));
            if (cost >= best) continue;
            best = cost;
            tile_parts = n;
            column_parts = m;
        }
    }
    int64_t across, in_image, tiles, points, pitch, groups, tile_parts = 1, column_parts = 1;
};

// Memory of a task, and where its tiles are.
struct Tiles {
    Tiles(const Convolution& call, const Plan& plan, int64_t first, int64_t count)
        : count(count), point_pitch(count * plan.pitch + kGap), sum_pitch(count * kColumns + kGap) {
        const int64_t side = call.tile + 2, pointers = divided_up(count * plan.points * int64_t{sizeof(float*)}, 64) * kGap;
        const int64_t offsets = divided_up(count * call.tile * call.tile * int64_t{sizeof(int64_t)}, 64) * kGap;
        points = scratch(plan.points * (point_pitch + sum_pitch) + call.in_channels + count * kPanel + pointers + offsets);
        sums = points + plan.points * point_pitch;
        float* zeros = sums + plan.points * sum_pitch;
        checks = zeros + call.in_channels;
        pixels = reinterpret_cast<const float**>(checks + count * kPanel);
        places = reinterpret_cast<int64_t*>(checks + count * kPanel + pointers);
        std::fill_n(zeros, call.in_channels + count * kPanel, 0.0f);
        const float** pixel = pixels;
        int64_t* place = places;
        for (int64_t n = first; n < first + count; ++n) {
            const int64_t image = n / plan.in_image, top = n % plan.in_image / plan.across * call.tile, left = n % plan.across * call.tile;
            for (int64_t y = top - call.padding[0]; y < top - call.padding[0] + side; ++y)
                for (int64_t x = left - call.padding[1]; x < left - call.padding[1] + side; ++x) {
                    const bool inside = y >= 0 && y < call.height && x >= 0 && x < call.width;
                    *pixel++ = inside ? call.x + ((image * call.height + y) * call.width + x) * call.in_channels : zeros;
                }
            for (int64_t y = top; y < top + call.tile; ++y)
                for (int64_t x = left; x < left + call.tile; ++x) {
                    const bool inside = y < call.out_height && x < call.out_width;
                    *place++ = inside ? ((image * call.out_height + y) * call.out_width + x) * call.out_channels : -1;
                }
        }
    }
    int64_t count, point_pitch, sum_pitch;
    float *points, *sums, *checks;
    const float** pixels;
    int64_t* places;
};

using Flags = std::vector<std::atomic<bool>>;

// `wrong`: of images, some of whose results are not finite.
void run_task(const Convolution& call, const Plan& plan, int64_t task, const isa::Table& kernels, Flags& wrong) {
    const int64_t part = task / plan.column_parts, column_part = task % plan.column_parts;
    const int64_t first = plan.tiles * part / plan.tile_parts, last = plan.tiles * (part + 1) / plan.tile_parts;
    const Tiles tiles(call, plan, first, last - first);
    kernels.winograd_input_f32({tiles.pixels, tiles.points, tiles.count, call.in_channels, plan.pitch, tiles.point_pitch, call.tile});
    Block product{};
    product.x_pitch = plan.pitch;
    product.panel_pitch = plan.points * call.in_channels * kPanel;
    product.y_pitch = kColumns;
    product.rows = product.line = tiles.count;
    product.taps = 1;
    product.depth = call.in_channels;
    product.first = product.last = true;
    const int64_t end = plan.groups * (column_part + 1) / plan.column_parts;
    for (int64_t group = plan.groups * column_part / plan.column_parts; group < end; ++group) {
        const int64_t column = group * kColumns;
        product.columns = std::min(kColumns, call.out_channels - column);
        for (int64_t point = 0; point < plan.points; ++point) {
            product.x = tiles.points + point * tiles.point_pitch;
            product.panels = call.packed + column / kPanel * product.panel_pitch + point * call.in_channels * kPanel;
            product.y = tiles.sums + point * tiles.sum_pitch;
            kernels.product_f32(product);
        }
        kernels.winograd_output_f32({tiles.sums, tiles.places, call.bias ? call.bias + column : nullptr,
                                     call.addend ? call.addend + column : nullptr, call.y + column, tiles.checks, tiles.count,
                                     product.columns, kColumns, tiles.sum_pitch, call.tile, call.activation});
    }
    for (int64_t n = 0; n < tiles.count; ++n) {
        float sum = 0;
        for (int64_t lane = 0; lane < kPanel; ++lane) sum += tiles.checks[n * kPanel + lane];
        if (sum != 0) wrong[static_cast<size_t>((first + n) / plan.in_image)] = true;
    }
}

// Packs a panel of at most kPanel columns to [points][channels][kPanel]; `kSide` is of the points. Returns whether the weights are small.
template <int kSide>
bool pack_panel(const Taps& w, int64_t columns, int64_t channels, float* packed) {
    constexpr int64_t kChannels = 8;  // that are next to each other, so that memory is written in runs
    using Number = std::conditional_t<kSide == 4, float, double>;  // the small tiles' are sums of halves
    Number points[kSide][kTaps];
    for (int64_t i = 0; i < kSide * kTaps; ++i)
        points[i / kTaps][i % kTaps] = static_cast<Number>(weights_to_points(kSide - 2)[i / kTaps][i % kTaps]);
    bool small = true;
    for (int64_t first = 0; first < channels; first += kChannels) {
        const int64_t count = std::min(kChannels, channels - first);
        float out[kSide * kSide][kChannels * kPanel];
        for (int64_t n = 0; n < count; ++n) {
            Number taps[kTaps][kTaps][kPanel] = {}, lines[kTaps][kPanel];
            for (int64_t j = 0; j < columns; ++j)
                for (int64_t k = 0; k < kTaps * kTaps; ++k) {
                    const float tap = w.w[j * w.out + (first + n) * w.in + k / kTaps * w.down + k % kTaps * w.right];
                    small &= std::abs(tap) < kMaxTap;
                    taps[k / kTaps][k % kTaps][j] = Number{tap};
                }
            for (int64_t i = 0; i < kSide; ++i) {
                for (int64_t k = 0; k < kTaps; ++k)
                    for (int64_t j = 0; j < kPanel; ++j)
                        lines[k][j] = points[i][0] * taps[0][k][j] + points[i][1] * taps[1][k][j] + points[i][2] * taps[2][k][j];
                for (int64_t k = 0; k < kSide; ++k)
                    for (int64_t j = 0; j < kPanel; ++j)
                        out[i * kSide + k][n * kPanel + j] = static_cast<float>(
                            points[k][0] * lines[0][j] + points[k][1] * lines[1][j] + points[k][2] * lines[2][j]);
            }
        }
        for (int64_t point = 0; point < kSide * kSide; ++point)
            std::copy_n(out[point], count * kPanel, packed + (point * channels + first) * kPanel);
    }
    return small;
}

// Of a sum of four float32 numbers, compared with the largest: a weight of zero is recovered as such.
constexpr double kRounding = 2.5e-7;

// Computes images again by the direct method.
void repair(const Convolution& call, const Flags& wrong, const Parallel& parallel, const isa::Table& kernels) {
    if (std::none_of(wrong.begin(), wrong.end(), [](const auto& each) { return each.load(); })) return;
    const int64_t points = point_count(call.tile), side = call.tile + 2, panel = call.in_channels * kPanel;
    const Memory packed(packed_floats(call.out_channels, kTaps * kTaps * call.in_channels));
    const Matrix& taps = points_to_weights(call.tile);
    deal(parallel, divided_up(call.out_channels, kPanel) * kTaps * kTaps, [&](int64_t n) {
        const float* from = call.packed + n / (kTaps * kTaps) * points * panel;
        float* to = packed.data() + n * panel;
        const double *down = taps[n % (kTaps * kTaps) / kTaps], *right = taps[n % kTaps];
        if (const Taps* w = call.weight) {
            const int64_t column = n / (kTaps * kTaps) * kPanel, columns = std::min(kPanel, call.out_channels - column);
            const float* tap = w->w + column * w->out + n % (kTaps * kTaps) / kTaps * w->down + n % kTaps * w->right;
            for (int64_t k = 0; k < panel; ++k) to[k] = k % kPanel < columns ? tap[k % kPanel * w->out + k / kPanel * w->in] : 0.0f;
            return;
        }
        for (int64_t k = 0; k < panel; ++k) {
            double sum = 0, largest = 0;
            for (int64_t i = 0; i < side; ++i)
                for (int64_t j = 0; j < side; ++j) {
                    const double term = down[i] * right[j] * double{from[(i * side + j) * panel + k]};
                    sum += term;
                    largest = std::max(largest, std::abs(term));
                }
            to[k] = std::abs(sum) <= kRounding * largest ? 0.0f : static_cast<float>(sum);
        }
    });
    Convolution direct = call;
    direct.batch = 1;
    direct.packed = packed.data();
    direct.tile = 0;
    const int64_t image = call.height * call.width * call.in_channels, result = call.out_height * call.out_width * call.out_channels;
    for (size_t n = 0; n < wrong.size(); ++n) {
        if (!wrong[n]) continue;
        direct.x = call.x + static_cast<int64_t>(n) * image;
        direct.y = call.y + static_cast<int64_t>(n) * result;
        direct.addend = call.addend ? call.addend + static_cast<int64_t>(n) * result : nullptr;
        convolution(direct, parallel, kernels);
    }
}

}  // namespace

int64_t packed_winograd_floats(int64_t out_channels, int64_t in_channels, int64_t tile) {
    return packed_floats(out_channels, point_count(tile) * in_channels);
}

bool pack_winograd(const Taps& w, int64_t out_channels, int64_t in_channels, int64_t tile, float* packed, const Parallel& parallel) {
    const auto pack = tile == 2 ? pack_panel<4> : pack_panel<6>;
    const int64_t panels = divided_up(out_channels, kPanel), panel = point_count(tile) * in_channels * kPanel;
    const Parallel workers{parallel.run, panels * panel < kMinShared ? 1 : parallel.threads, parallel.self};
    std::atomic<bool> small{true};
    deal(workers, panels, [&](int64_t n) {
        const int64_t column = n * kPanel;
        if (!pack({w.w + column * w.out, w.out, w.in, w.down, w.right}, std::min(kPanel, out_channels - column), in_channels,
                  packed + n * panel))
            small = false;
    });
    return small;
}

bool winograd(Convolution call, const Taps& w, const Parallel& parallel, const isa::Table& kernels) {
    const Memory packed(packed_winograd_floats(call.out_channels, call.in_channels, call.tile));
    if (!pack_winograd(w, call.out_channels, call.in_channels, call.tile, packed.data(), parallel)) return false;
    call.packed = packed.data();
    call.weight = &w;
    winograd(call, parallel, kernels);
    return true;
}

void winograd(const Convolution& call, const Parallel& parallel, const isa::Table& kernels) {
    const int64_t work = packed_winograd_floats(call.out_channels, call.in_channels, call.tile) * divided_up(call.out_height, call.tile) *
                         divided_up(call.out_width, call.tile) * call.batch;
    const Plan plan(call, work < kMinShared ? 1 : parallel.threads);
    Flags wrong(static_cast<size_t>(call.batch));
    deal(parallel, plan.tile_parts * plan.column_parts, [&](int64_t task) { run_task(call, plan, task, kernels, wrong); });
    repair(call, wrong, parallel, kernels);
}

}  // namespace opkit::product
