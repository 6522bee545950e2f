// Conversions, packing and products of matrices: every ISA that runs here, against integers and float64.
#include <cmath>
#include <cstring>
#include <vector>

#include "numbers.hpp"

namespace opkit::driver {
namespace {

constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 65};
constexpr double kUnit = 0x1p-24;

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

void check_widening(const isa::Choice& choice, Checks& checks) {
    std::vector<uint16_t> in;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) in.push_back(static_cast<uint16_t>(bits));
    for (int64_t n : {int64_t{0x10000}, int64_t{0}, int64_t{1}, int64_t{13}, int64_t{31}}) {
        std::vector<float> out(static_cast<size_t>(n));
        choice.kernels.bf16_to_f32(in.data(), out.data(), n);
        bool good = true;
        for (size_t i = 0; i < out.size(); ++i) {
            uint32_t bits;
            std::memcpy(&bits, &out[i], 4);
            good &= bits == static_cast<uint32_t>(in[i]) << 16;
        }
        checks.expect(good, choice.cap + ": bf16_to_f32 of " + std::to_string(n));
    }
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

struct Sizes {
    int64_t m, n, k;
    std::string text() const {
        return " m=" + std::to_string(m) + " n=" + std::to_string(n) + " k=" + std::to_string(k);
    }
};

// An element of a matrix.
template <class T>
double element(const std::vector<T>& matrix, int64_t at) {
    const Kind kind = sizeof(T) == 4 ? Kind::F32 : Kind::Bf16;
    return value_at(kind, reinterpret_cast<const unsigned char*>(&matrix[static_cast<size_t>(at)]));
}

template <class T>
std::vector<T> random_matrix(int64_t rows, int64_t columns, int64_t pitch, Random& random) {
    T nan;
    std::memset(&nan, 0xFF, sizeof nan);
    std::vector<T> found(span(rows, columns, pitch), nan);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j)
            put_random(sizeof(T) == 4 ? Kind::F32 : Kind::Bf16, random,
                       reinterpret_cast<unsigned char*>(&found[static_cast<size_t>(i * pitch + j)]));
    return found;
}

// |c - exact| <= gamma (|a| |b| + |c0|); what lies between rows of c stays.
template <class T>
bool near(const Sizes& s, const std::vector<T>& a, const std::vector<T>& b, const std::vector<float>& before,
          const std::vector<float>& after) {
    const double gamma = static_cast<double>(s.k + 2) * kUnit / (1 - static_cast<double>(s.k + 2) * kUnit);
    bool good = true;
    for (int64_t at = 0; at < static_cast<int64_t>(after.size()); ++at) {
        const int64_t i = at / (s.n + 2), j = at % (s.n + 2);
        const double c = before[static_cast<size_t>(at)], found = after[static_cast<size_t>(at)];
        double exact = c, size = std::fabs(c);
        for (int64_t p = 0; j < s.n && p < s.k; ++p) {
            const double product = element(a, i * (s.k + 1) + p) * element(b, p * (s.n + 3) + j);
            exact += product, size += std::fabs(product);
        }
        good &= j < s.n ? std::fabs(found - exact) <= gamma * size : std::isnan(found);
    }
    return good;
}

template <class T>
void check_product(const isa::Choice& choice, const Sizes& s, Checks& checks) {
    Random random(static_cast<uint64_t>(s.m * 10007 + s.n * 101 + s.k));
    const auto a = random_matrix<T>(s.m, s.k, s.k + 1, random), b = random_matrix<T>(s.k, s.n, s.n + 3, random);
    const auto before = random_matrix<float>(s.m, s.n, s.n + 2, random);
    auto after = before;
    if constexpr (sizeof(T) == 4)
        choice.kernels.gemm_block_f32(a.data(), s.k + 1, b.data(), s.n + 3, after.data(), s.n + 2, s.m, s.n, s.k);
    else
        choice.kernels.gemm_block_bf16(a.data(), s.k + 1, pairs(b, s.n + 3, s.n, s.k).data(), after.data(), s.n + 2, s.m, s.n, s.k);
    checks.expect(near(s, a, b, before, after), choice.cap + (sizeof(T) == 4 ? ": gemm_block_f32" : ": gemm_block_bf16") + s.text());
}

// The last k of 513 stands alone in its pair; the other place of the pair may have held NaN, of rows further down.
void check_last_of_pair(const isa::Choice& choice, Checks& checks) {
    constexpr int64_t m = 29, n = 7, k = 513;
    Random random(1);
    auto a = random_matrix<uint16_t>(m, k, k, random);
    const auto b = random_matrix<uint16_t>(k, n, n, random);
    for (int64_t i = 20; i < m; ++i)
        for (int64_t p : {1, 257}) a[static_cast<size_t>(i * k + p)] = 0x7FC0;
    std::vector<float> c(m * n);
    choice.kernels.gemm_block_bf16(a.data(), k, pairs(b, n, n, k).data(), c.data(), n, m, n, k);
    bool good = true;
    for (int64_t at = 0; at < m * n; ++at) good &= std::isnan(c[static_cast<size_t>(at)]) == (at / n >= 20);
    checks.expect(good, choice.cap + ": gemm_block_bf16: NaN reaches other rows");
}

}  // namespace

void check_conversions(const Isas& isas, Checks& checks) {
    for (const isa::Choice* choice : isas) {
        check_widening(*choice, checks);
        check_narrowing(*choice, checks);
        for (int64_t n : kSizes)
            for (int64_t k : kSizes) check_packing(*choice, n, k, checks);
        for (int64_t keys : {0, 1, 5, 16, 31, 64})
            for (int64_t words : kSizes) check_turning(*choice, keys, words, checks);
    }
}

void check_products(const Isas& isas, Checks& checks) {
    std::vector<Sizes> all;
    for (int64_t m : kSizes)
        for (int64_t n : kSizes)
            for (int64_t k : {0, 1, 2, 7, 33}) all.push_back({m, n, k});
    for (int64_t k : {255, 257, 513, 1030}) all.push_back({15, 37, k});
    for (const isa::Choice* choice : isas) {
        check_last_of_pair(*choice, checks);
        for (const Sizes& sizes : all) {
            check_product<float>(*choice, sizes, checks);
            check_product<uint16_t>(*choice, sizes, checks);
        }
    }
}

}  // namespace opkit::driver
