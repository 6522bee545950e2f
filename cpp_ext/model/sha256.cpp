#include "sha256.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace opkit::model {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

void plain_blocks(uint32_t* state, const uint8_t* data, size_t blocks) {
    for (; blocks > 0; --blocks, data += 64) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; ++i)
            w[i] = static_cast<uint32_t>(data[4 * i]) << 24 | data[4 * i + 1] << 16 | data[4 * i + 2] << 8 | data[4 * i + 3];
        for (int i = 16; i < 64; ++i)
            w[i] = w[i - 16] + w[i - 7] + (rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3) +
                   (rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10);
        std::memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; ++i) {
            const uint32_t one = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) +
                                 ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRound[i] + w[i];
            const uint32_t two =
                (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
            std::memmove(s + 1, s, 7 * sizeof *s);
            s[4] += one;
            s[0] = one + two;
        }
        for (int i = 0; i < 8; ++i) state[i] += s[i];
    }
}

#if defined(__x86_64__)
// Two of the instructions do four rounds; the state is in the order that they take: (f e b a) and (h g d c), from the lowest.
__attribute__((target("sha,sse4.1"))) void sha_blocks(uint32_t* state, const uint8_t* data, size_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = _mm_set_epi32(static_cast<int>(state[0]), static_cast<int>(state[1]), static_cast<int>(state[4]),
                                 static_cast<int>(state[5]));
    __m128i cdgh = _mm_set_epi32(static_cast<int>(state[2]), static_cast<int>(state[3]), static_cast<int>(state[6]),
                                 static_cast<int>(state[7]));
    for (; blocks > 0; --blocks, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; ++i)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i), swap);
        for (int i = 0; i < 16; ++i) {
            if (i >= 4) {
                const __m128i near = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
                w[i % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), near),
                                                w[(i + 3) % 4]);
            }
            const __m128i words = _mm_add_epi32(w[i % 4], _mm_loadu_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    state[0] = static_cast<uint32_t>(_mm_extract_epi32(abef, 3));
    state[1] = static_cast<uint32_t>(_mm_extract_epi32(abef, 2));
    state[4] = static_cast<uint32_t>(_mm_extract_epi32(abef, 1));
    state[5] = static_cast<uint32_t>(_mm_extract_epi32(abef, 0));
    state[2] = static_cast<uint32_t>(_mm_extract_epi32(cdgh, 3));
    state[3] = static_cast<uint32_t>(_mm_extract_epi32(cdgh, 2));
    state[6] = static_cast<uint32_t>(_mm_extract_epi32(cdgh, 1));
    state[7] = static_cast<uint32_t>(_mm_extract_epi32(cdgh, 0));
}

bool has_sha() {
    uint32_t a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (b >> 29 & 1) != 0 && __builtin_cpu_supports("sse4.1");
}

void blocks_of(uint32_t* state, const uint8_t* data, size_t blocks) {
    static const bool fast = has_sha();
    (fast ? sha_blocks : plain_blocks)(state, data, blocks);
}
#else
constexpr auto blocks_of = plain_blocks;
#endif

}  // namespace

std::string sha256(const void* data, size_t size) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const auto* bytes = static_cast<const uint8_t*>(data);
    blocks_of(state, bytes, size / 64);
    uint8_t last[128] = {};
    const size_t rest = size % 64, padded = rest < 56 ? 64 : 128;
    if (rest > 0) std::memcpy(last, bytes + size - rest, rest);
    last[rest] = 0x80;
    for (size_t i = 0; i < 8; ++i) last[padded - 1 - i] = static_cast<uint8_t>(static_cast<uint64_t>(size) * 8 >> (8 * i));
    blocks_of(state, last, padded / 64);
    std::string text;
    for (uint32_t word : state)
        for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
}

}  // namespace opkit::model
