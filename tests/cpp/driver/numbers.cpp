#include "numbers.hpp"

#include <cmath>
#include <cstring>

namespace opkit::driver {
namespace {

template <class T>
T taken(const unsigned char* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// A finite float of so many bits of exponent and of fraction.
double small_float(uint32_t bits, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
    const double fraction = std::ldexp(static_cast<double>(bits & ((1u << fraction_bits) - 1)), -fraction_bits);
    const double size = exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
    return bits >> (exponent_bits + fraction_bits) & 1 ? -size : size;
}

double half_value(uint16_t bits) {
    if ((bits & 0x7C00) != 0x7C00) return small_float(bits, 5, 10);
    return bits & 0x3FF ? std::nan("") : bits & 0x8000 ? -INFINITY : INFINITY;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

}  // namespace

int64_t size_of(Kind kind) { return kind == Kind::F32 ? 4 : kind == Kind::Bf16 || kind == Kind::F16 ? 2 : 1; }

const char* name_of(Kind kind) {
    constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8", "float8"};
    return kNames[static_cast<int>(kind)];
}

double value_at(Kind kind, const unsigned char* at) {
    switch (kind) {
        case Kind::F32: return taken<float>(at);
        case Kind::Bf16: {
            const unsigned char wide[4] = {0, 0, at[0], at[1]};
            return taken<float>(wide);
        }
        case Kind::F16: return half_value(taken<uint16_t>(at));
        case Kind::I8: return static_cast<int8_t>(*at);
        case Kind::F8: return (*at & 0x7F) == 0x7F ? std::nan("") : small_float(*at, 4, 3);
    }
    return 0;
}

void put_random(Kind kind, Random& random, unsigned char* at) {
    const auto value = static_cast<float>(random.normal());
    const uint16_t bf16 = rounded_to_bf16(value), half = rounded_to_half(value);
    if (kind == Kind::F32) std::memcpy(at, &value, 4);
    if (kind == Kind::Bf16) std::memcpy(at, &bf16, 2);
    if (kind == Kind::F16) std::memcpy(at, &half, 2);
    if (kind == Kind::I8) *at = static_cast<unsigned char>(random.bits());
    if (kind == Kind::F8) *at = static_cast<unsigned char>((random.bits() & 0x80) | static_cast<uint64_t>(random.below(0x48)));
}

uint16_t rounded_to_bf16(float value) {
    if (std::isnan(value)) return 0x7FC0;
    const uint64_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t rounded_to_half(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return 0x7E00;
    const double size = std::fabs(static_cast<double>(value));
    const int exponent = size < std::ldexp(1, -14) ? -14 : std::ilogb(size);
    if (size >= 65520) return sign | 0x7C00;
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 2048 moves to the next exponent
    return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + units));
}

Tensor::Tensor(Kind kind, int64_t batch, int64_t heads, int64_t rows, int64_t columns, bool out_is_bshd, int64_t gap)
    : kind(kind), sizes{batch, heads, rows, columns} {
    const int64_t row = columns + gap;
    stride[0] = heads * rows * row;
    stride[1] = out_is_bshd ? row : rows * row;
    stride[2] = out_is_bshd ? heads * row : row;
    bytes.assign(static_cast<size_t>(batch * stride[0] * size_of(kind)), 0xFF);
}

void Tensor::fill(Random& random) {
    for (int64_t b = 0; b < sizes[0]; ++b)
        for (int64_t h = 0; h < sizes[1]; ++h)
            for (int64_t i = 0; i < sizes[2]; ++i)
                for (int64_t c = 0; c < sizes[3]; ++c) put_random(kind, random, at(b, h, i) + c * size_of(kind));
}

void Tensor::poison(int64_t b, int64_t h, int64_t i) { std::memset(at(b, h, i), 0xFF, static_cast<size_t>(sizes[3] * size_of(kind))); }

bool Tensor::gaps_kept() {
    const int64_t used = sizes[3] * size_of(kind), row = (stride[1] < stride[2] ? stride[1] : stride[2]) * size_of(kind);
    for (size_t n = 0; n < bytes.size(); ++n)
        if (static_cast<int64_t>(n) % row >= used && bytes[n] != 0xFF) return false;
    return true;
}

}  // namespace opkit::driver
