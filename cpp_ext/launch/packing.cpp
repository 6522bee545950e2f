#include "packing.hpp"

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace opkit::launch {
namespace {

uint64_t bits(float value) {
    uint32_t result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

uint64_t bits(double value) {
    uint64_t result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}

uint64_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

uint64_t dimension(const Parameter& parameter, const Frame& frame) {
    const opk_tensor* tensor = frame.tensor(static_cast<size_t>(parameter.source));
    if (tensor == nullptr) return 0;
    const int64_t d = parameter.detail < 0 ? parameter.detail + tensor->rank : parameter.detail;
    if (d < 0 || d >= tensor->rank)
        throw std::runtime_error("it takes dimension " + std::to_string(parameter.detail) + " of " +
                                 frame.source(static_cast<size_t>(parameter.source)).name + ", which has " +
                                 std::to_string(tensor->rank));
    return static_cast<uint64_t>((parameter.kind == Kind::kSize ? tensor->sizes : tensor->strides)[d]);
}

uint64_t number(Kind kind, double value) {
    switch (kind) {
        case Kind::kHalf: return half_bits(value);
        case Kind::kBfloat16: return bfloat16_bits(value);
        case Kind::kFloat: return bits(static_cast<float>(value));
        default: return bits(value);
    }
}

uint64_t scalar(const Parameter& parameter, const Frame& frame) {
    const size_t source = static_cast<size_t>(parameter.source);
    const opk_value value = frame.scalar(source);
    const bool real = frame.source(source).real();
    if (parameter.kind == Kind::kInteger) return static_cast<uint64_t>(real ? static_cast<int64_t>(value.f) : value.i);
    return number(parameter.kind, real ? value.f : static_cast<double>(value.i));
}

}  // namespace

Parameter parse_parameter(const std::string& kind, int64_t source, int64_t detail) {
    static constexpr Parameter kKinds[] = {
        {"ptr", Kind::kPointer, 8, 0, 0},
        {"i1", Kind::kInteger, 1, 0, 0},
        {"i8", Kind::kInteger, 1, 0, 0},
        {"i16", Kind::kInteger, 2, 0, 0},
        {"i32", Kind::kInteger, 4, 0, 0},
        {"i64", Kind::kInteger, 8, 0, 0},
        {"u1", Kind::kInteger, 1, 0, 0},
        {"u8", Kind::kInteger, 1, 0, 0},
        {"u16", Kind::kInteger, 2, 0, 0},
        {"u32", Kind::kInteger, 4, 0, 0},
        {"u64", Kind::kInteger, 8, 0, 0},
        {"fp16", Kind::kHalf, 2, 0, 0},
        {"bf16", Kind::kBfloat16, 2, 0, 0},
        {"fp32", Kind::kFloat, 4, 0, 0},
        {"fp64", Kind::kDouble, 8, 0, 0},
        {"const", Kind::kConstant, 0, 0, 0},
        {"size32", Kind::kSize, 4, 0, 0},
        {"size64", Kind::kSize, 8, 0, 0},
        {"stride32", Kind::kStride, 4, 0, 0},
        {"stride64", Kind::kStride, 8, 0, 0},
        {"map", Kind::kMap, 128, 0, 0},
        {"scratch", Kind::kScratch, 8, 0, 0},
        {"profile_scratch", Kind::kProfileScratch, 8, 0, 0},
        {"offset", Kind::kOffset, 4, 0, 0},
        {"offset64", Kind::kOffset, 8, 0, 0},
        {"total", Kind::kTotal, 4, 0, 0},
        {"total64", Kind::kTotal, 8, 0, 0},
    };
    std::string known;
    for (const Parameter& row : kKinds) {
        if (kind == row.name) return {row.name, row.kind, row.bytes, source, detail};
        known += std::string(known.empty() ? "" : ", ") + row.name;
    }
    throw std::invalid_argument("\"" + kind + "\" is no kind of a parameter; the kinds are " + known);
}

void pack(const std::vector<Parameter>& parameters, const Maps& maps, const Driver& driver, const Frame& frame,
          const Memory& memory, const Extent& grid, Packed& packed) {
    for (size_t i = 0; i < parameters.size(); i++) {
        const Parameter& parameter = parameters[i];
        uint64_t& word = packed.words[i];
        packed.pointers[i] = &word;
        switch (parameter.kind) {
            case Kind::kPointer: {
                const opk_tensor* tensor = frame.tensor(static_cast<size_t>(parameter.source));
                word = tensor == nullptr ? 0 : address(tensor->data);
                break;
            }
            case Kind::kSize:
            case Kind::kStride: word = dimension(parameter, frame); break;
            case Kind::kConstant: word = static_cast<uint64_t>(parameter.detail); break;
            case Kind::kScratch: word = address(memory.scratch); break;
            case Kind::kProfileScratch: word = address(memory.profile_scratch); break;
            case Kind::kOffset: word = 0; break;
            case Kind::kTotal: word = static_cast<uint64_t>(grid[static_cast<size_t>(parameter.detail)]); break;
            case Kind::kMap: packed.pointers[i] = &packed.maps[parameter.source]; break;
            default: word = scalar(parameter, frame);
        }
    }
    for (size_t i = 0; i < maps.size(); i++) maps[i]->write(driver, frame, packed.maps[i]);
}

// To nearest, ties to even. A double is first made odd-rounded to float, so that no second rounding shows.
uint16_t bfloat16_bits(double value) {
    if (std::isnan(value)) return 0x7FC0;
    float nearest = static_cast<float>(value);
    uint32_t word = static_cast<uint32_t>(bits(nearest));
    if (std::isfinite(nearest) && static_cast<double>(nearest) != value) {
        if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) word--;
        word |= 1;
    }
    return static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

uint16_t half_bits(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(value);
    if (std::isnan(value)) return 0x7E00;
    if (size >= 65520) return sign | 0x7C00;
    int exponent;
    std::frexp(size, &exponent);  // size < 2^exponent
    exponent =
        size < std::ldexp(1.0, -14) ? -14 : exponent - 1;  // that of the leading bit; subnormals share the lowest
    const auto steps = static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return static_cast<uint16_t>(sign | (steps + ((exponent + 14) << 10)));
}

}  // namespace opkit::launch
