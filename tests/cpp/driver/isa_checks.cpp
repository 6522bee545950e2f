// Conversions and packing: every ISA that runs here, against integers.
#include <cstring>
#include <vector>

#include "numbers.hpp"

namespace opkit::driver {
namespace {

constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 65};

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Every upper half with the lower halves that matter: ties, their neighbours, payloads of NaN.
std::vector<float> interesting() {
    std::vector<float> found;
    for (uint32_t upper = 0; upper < 0x10000; upper += 3)
        for (uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) found.push_back(float_of(upper << 16 | lower));
    return found;
}

void check_narrowing(const isa::Choice& choice, Checks& checks) {
    const std::vector<float> in = interesting();
    for (size_t n : {in.size(), size_t{0}, size_t{1}, size_t{5}, size_t{17}}) {
        std::vector<uint16_t> out(n);
        choice.kernels.f32_to_bf16(in.data(), out.data(), static_cast<int64_t>(n));
        bool good = true;
        for (size_t i = 0; i < n; ++i) good &= out[i] == rounded_to_bf16(in[i]);
        checks.expect(good, choice.cap + ": f32_to_bf16 of " + std::to_string(n));
    }
}

// b[k][n] of rows `pitch` apart, as pairs of consecutive k.
std::vector<uint16_t> pairs(const std::vector<uint16_t>& b, int64_t pitch, int64_t n, int64_t k) {
    std::vector<uint16_t> out(static_cast<size_t>((k + 1) / 2 * n * 2));
    for (int64_t p = 0; p < k; ++p)
        for (int64_t j = 0; j < n; ++j) out[static_cast<size_t>((p / 2 * n + j) * 2 + p % 2)] = b[static_cast<size_t>(p * pitch + j)];
    return out;
}

// Of rows of `columns` elements, the last without what lies between rows, so that reading there is out of bounds.
size_t span(int64_t rows, int64_t columns, int64_t pitch) {
    return static_cast<size_t>(rows && columns ? (rows - 1) * pitch + columns : 0);
}

void check_packing(const isa::Choice& choice, int64_t n, int64_t k, Checks& checks) {
    Random random(static_cast<uint64_t>(n * 100 + k));
    const int64_t pitch = n + 3;
    std::vector<uint16_t> b(span(k, n, pitch)), packed(static_cast<size_t>((k + 1) / 2 * n * 2), 0xABCD);
    for (uint16_t& each : b) each = static_cast<uint16_t>(random.bits());
    choice.kernels.pack_b_bf16(b.data(), pitch, packed.data(), n, k);
    checks.expect(packed == pairs(b, pitch, n, k), choice.cap + ": pack_b_bf16 n=" + std::to_string(n) + " k=" + std::to_string(k));
}

void check_turning(const isa::Choice& choice, int64_t keys, int64_t words, Checks& checks) {
    const int64_t pitch = words + 2;
    std::vector<uint32_t> rows(span(keys, words, pitch)), out(static_cast<size_t>(words * attention::kKeys), 7);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint32_t>(i * 2654435761u);
    std::vector<uint32_t> wanted = out;
    for (int64_t i = 0; i < keys; ++i)
        for (int64_t j = 0; j < words; ++j)
            wanted[static_cast<size_t>(j * attention::kKeys + i)] = rows[static_cast<size_t>(i * pitch + j)];
    choice.kernels.transpose_words(rows.data(), pitch, keys, words, out.data());
    checks.expect(out == wanted,
                  choice.cap + ": transpose_words keys=" + std::to_string(keys) + " words=" + std::to_string(words));
}

}  // namespace

void check_conversions(const Isas& isas, Checks& checks) {
    for (const isa::Choice* choice : isas) {
        check_narrowing(*choice, checks);
        for (int64_t n : kSizes)
            for (int64_t k : kSizes) check_packing(*choice, n, k, checks);
        for (int64_t keys : {0, 1, 5, 16, 31, 64})
            for (int64_t words : kSizes) check_turning(*choice, keys, words, checks);
    }
}

}  // namespace opkit::driver
