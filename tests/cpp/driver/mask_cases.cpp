#include "mask_cases.hpp"

#include <cmath>
#include <cstdlib>

#include "numbers.hpp"

namespace opkit::driver {
namespace {

using attention::Strided;
using Ints = std::vector<int32_t>;

constexpr int64_t kFar = int64_t{1} << 62;
constexpr int64_t kAnd = 0, kOr = 1, kNot = 2, kBand = 3, kSegments = 4, kLength = 5, kDense = 6, kBandAt = 7;

// Memory that a case keeps, as a tensor.
template <class Case, class T>
const T* keep(Case& to, std::vector<T> values) {
    auto held = std::make_shared<std::vector<T>>(std::move(values));
    to.kept.push_back(held);
    return held->data();
}

MaskCase band(const std::string& name, int64_t lower, int64_t upper) {
    return {name, {kBand, lower, upper}, {}, [=](int64_t, int64_t, int64_t i, int64_t j) { return lower <= j - i && j - i <= upper; }, {}};
}

MaskCase segments(const Shape& s, uint64_t seed) {
    Random random(seed);
    Ints rows, keys;
    for (int64_t n = 0; n < s.batch * s.queries; ++n) rows.push_back(static_cast<int32_t>(n % s.queries * 3 / s.queries));
    for (int64_t n = 0; n < s.batch * s.keys; ++n)
        keys.push_back(static_cast<int32_t>(n % s.keys < 80 ? n % s.keys * 4 / s.keys : random.below(4)));
    MaskCase made{"segments", {kSegments, 0, 1}, {}, {}, {}};
    const int32_t *of_rows = keep(made, rows), *of_keys = keep(made, keys);
    made.tensors = {Strided{of_rows, {s.queries, 1}}, Strided{of_keys, {s.keys, 1}}};
    made.visible = [=](int64_t b, int64_t, int64_t i, int64_t j) { return of_rows[b * s.queries + i] == of_keys[b * s.keys + j]; };
    return made;
}

MaskCase lengths(const Shape& s) {
    Ints all;
    for (int64_t b = 0; b < s.batch; ++b) all.push_back(static_cast<int32_t>(b % 2 ? s.keys / 2 : s.keys - 1));
    MaskCase made{"length", {kLength, 0}, {}, {}, {}};
    const int32_t* length = keep(made, all);
    made.tensors = {Strided{length, {1}}};
    made.visible = [=](int64_t b, int64_t, int64_t, int64_t j) { return j < length[b]; };
    return made;
}

// Of all heads at once; some rows see nothing.
MaskCase dense(const Shape& s, uint64_t seed) {
    Random random(seed);
    std::vector<unsigned char> all;
    for (int64_t n = 0; n < s.batch * s.queries * s.keys; ++n) all.push_back(n / s.keys % 5 != 3 && random.below(3) > 0);
    MaskCase made{"dense", {kDense, 0}, {}, {}, {}};
    const unsigned char* truth = keep(made, all);
    made.tensors = {Strided{truth, {s.queries * s.keys, 0, s.keys, 1}}};
    made.visible = [=](int64_t b, int64_t, int64_t i, int64_t j) { return truth[(b * s.queries + i) * s.keys + j] != 0; };
    return made;
}

MaskCase band_at(const Shape& s, uint64_t seed) {
    Random random(seed);
    Ints all;
    for (int64_t n = 0; n < s.batch * s.queries; ++n) all.push_back(static_cast<int32_t>(random.below(s.keys) - n % s.queries));
    MaskCase made{"band at offsets", {kBandAt, 0, -20, 3}, {}, {}, {}};
    const int32_t* offset = keep(made, all);
    made.tensors = {Strided{offset, {s.queries, 1}}};
    made.visible = [=](int64_t b, int64_t, int64_t i, int64_t j) {
        const int64_t at = j - i - offset[b * s.queries + i];
        return -20 <= at && at <= 3;
    };
    return made;
}

// A window, or what is before a length and of no own segment.
MaskCase composed(const Shape& s) {
    const MaskCase own = segments(s, 5), length = lengths(s);
    MaskCase made{"composed", {kBand, -9, 4, kSegments, 0, 1, kNot, kLength, 2, kAnd, kOr}, {}, {}, {}};
    made.tensors = {own.tensors[0], own.tensors[1], length.tensors[0]};
    made.kept = own.kept;
    made.kept.insert(made.kept.end(), length.kept.begin(), length.kept.end());
    made.visible = [=](int64_t b, int64_t h, int64_t i, int64_t j) {
        return (-9 <= j - i && j - i <= 4) || (!own.visible(b, h, i, j) && length.visible(b, h, i, j));
    };
    return made;
}

BiasCase tensor_bias(const Shape& s, Kind kind, attention::Type type) {
    Random random(11);
    auto held = std::make_shared<Tensor>(kind, s.batch, 1, s.queries, s.keys, false, 1);
    held->fill(random);
    const attention::Typed typed{Strided{held->bytes.data(), {held->stride[0], 0, held->stride[2], 1}}, type};
    return {std::string("tensor of ") + name_of(kind), {0, 0}, {typed},
            [=](int64_t b, int64_t, int64_t i, int64_t j) { return held->value(b, 0, i, j); }, {held}};
}

// -inf here and there, and in all of a row, which sees nothing then.
BiasCase hiding_bias(const Shape& s) {
    BiasCase made{"tensor with -inf", {0, 0}, {}, {}, {}};
    std::vector<float> all;
    for (int64_t n = 0; n < s.queries * s.keys; ++n) all.push_back(n / s.keys == 2 || n % 11 == 5 ? -INFINITY : 0.25f);
    const float* bias = keep(made, all);
    made.tensors = {{Strided{bias, {0, 0, s.keys, 1}}, attention::Type::Float}};
    made.added = [=](int64_t, int64_t, int64_t i, int64_t j) { return bias[i * s.keys + j]; };
    return made;
}

BiasCase slopes(const Shape& s) {
    BiasCase made{"slopes", {1, 0}, {}, {}, {}};
    std::vector<float> all;
    for (int64_t h = 0; h < s.heads; ++h) all.push_back(static_cast<float>(std::ldexp(1, -static_cast<int>(h % 8) - 1)));
    const float* slope = keep(made, all);
    made.tensors = {{Strided{slope, {0, 1}}, attention::Type::Float}};
    made.added = [=](int64_t, int64_t h, int64_t i, int64_t j) {
        return -slope[h] * static_cast<double>(std::llabs(i + s.keys - s.queries - j));
    };
    return made;
}

BiasCase relative(const Shape& s) {
    constexpr int64_t kWidth = 7;
    Random random(12);
    const int64_t height = (s.keys + kWidth - 1) / kWidth;
    auto by_row = std::make_shared<Tensor>(Kind::F32, s.batch, s.heads, s.queries, height, false, 0);
    auto by_column = std::make_shared<Tensor>(Kind::Bf16, s.batch, s.heads, s.queries, kWidth, false, 0);
    by_row->fill(random), by_column->fill(random);
    const auto typed = [](Tensor& t, attention::Type type) {
        return attention::Typed{Strided{t.bytes.data(), {t.stride[0], t.stride[1], t.stride[2], 1}}, type};
    };
    return {"relative", {2, 0, 1, kWidth},
            {typed(*by_row, attention::Type::Float), typed(*by_column, attention::Type::Brain)},
            [=](int64_t b, int64_t h, int64_t i, int64_t j) {
                return by_row->value(b, h, i, j / kWidth) + by_column->value(b, h, i, j % kWidth);
            },
            {by_row, by_column}};
}

#ifdef OPKIT_FUNCTIONS
using attention::Code;
using attention::Function;

uintptr_t address_of(void (*function)()) { return reinterpret_cast<uintptr_t>(function); }

#include "function_cases.inc"

// mask and score of function_cases.py, whose tensors the functions alone read
MaskCase masked_by_function() {
    MaskCase made{"function", kMaskProgram, {}, {}, {}, {kMaskFunction}};
    for (const void* data : kMaskTensors) made.tensors.push_back({data, {}});
    made.visible = [](int64_t b, int64_t h, int64_t i, int64_t j) {
        return i % 2 == 0 ? (3 * i + 5 * j + h) % 7 < 4 : j < (b ? 133 : 40);
    };
    return made;
}

BiasCase scored_by_function() {
    BiasCase made{"function", kScoreProgram, {}, {}, {}, {kScoreFunction}, 1.5};
    for (const void* data : kScoreTensors) made.tensors.push_back({{data, {}}, attention::Type::Float});
    made.added = [](int64_t, int64_t h, int64_t i, int64_t j) {
        return i * j % 3 == 0 ? 0 : std::sin(static_cast<double>(h * (23 + 133) + i - j + 133) / 10);
    };
    return made;
}
#endif

// What is found of one tile against what is meant; where it is said to be full or hidden too.
bool agrees(const MaskCase& mask, const attention::Mask& asked, const attention::Tile& tile) {
    std::vector<uint64_t> scratch(static_cast<size_t>(asked.scratch(tile.rows))), bits(static_cast<size_t>(tile.rows));
    const attention::State state = asked.look(tile, scratch.data(), bits.data());
    for (int64_t i = 0; i < tile.rows; ++i)
        for (int64_t j = 0; j < attention::kKeys; ++j) {
            const bool wanted = j < tile.keys && mask.visible(tile.batch, tile.head, tile.row + i, tile.key + j);
            const bool found = state == attention::kFull || (state == attention::kPartial && bits[static_cast<size_t>(i)] >> j & 1);
            if (found != wanted) return false;
        }
    return true;
}

}  // namespace

std::vector<MaskCase> mask_cases(const Shape& s) {
    MaskCase none{"no mask", {}, {}, [](int64_t, int64_t, int64_t, int64_t) { return true; }, {}};
    return {none, band("causal", -kFar, 0), band("window", -9, 5), band("nothing visible", 5000, 6000),
            segments(s, 3), lengths(s), dense(s, 4), band_at(s, 6), composed(s),
#ifdef OPKIT_FUNCTIONS
            masked_by_function(),
#endif
    };
}

std::vector<BiasCase> bias_cases(const Shape& s) {
    return {
#ifdef OPKIT_FUNCTIONS
        scored_by_function(),
#endif
        tensor_bias(s, Kind::F32, attention::Type::Float), tensor_bias(s, Kind::F16, attention::Type::Half), hiding_bias(s),
        slopes(s), relative(s)};
}

void check_masks(Checks& checks) {
    const Shape shape{2, 2, 1, 75, 197, 0, 0};
    for (const MaskCase& mask : mask_cases(shape)) {
        const attention::Mask asked(mask.program, mask.tensors, shape.batch, shape.keys, mask.functions);
        for (int64_t b = 0; b < shape.batch; ++b)
            for (int64_t row : {int64_t{0}, int64_t{30}})
                for (int64_t key = 0; key < shape.keys; key += attention::kKeys) {
                    const int64_t keys = std::min(attention::kKeys, shape.keys - key);
                    checks.expect(agrees(mask, asked, {b, 1, row, 45, key, keys}),
                                  "mask " + mask.name + ": batch " + std::to_string(b) + " row " + std::to_string(row) + " key " +
                                      std::to_string(key));
                }
    }
}

}  // namespace opkit::driver
