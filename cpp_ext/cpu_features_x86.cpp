// x86: CPUID says what the processor has, XGETBV what the operating system saves on a context switch.
// Bit positions: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A, CPUID, and volume 1, chapter 13.
#include "cpu_features.hpp"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#include <cpuid.h>

#include <cstdint>
#include <cstring>

namespace opkit {
namespace {

enum Register { EAX, EBX, ECX, EDX };

// XCR0: the register files that the operating system saves.
constexpr uint64_t kYmm = 0x6;              // XMM and YMM
constexpr uint64_t kZmm = kYmm | 0xE0;      // opmask, upper halves of ZMM0-15, ZMM16-31
constexpr uint64_t kTile = 0x60000;         // AMX tile configuration and tile data
constexpr unsigned kOsxsave = 1u << 27;     // CPUID.1:ECX, XGETBV may be executed

struct Row {
    const char* name;
    unsigned leaf, subleaf;
    Register reg;
    unsigned bit;
    uint64_t state;  // the XCR0 bits that must be set
};

constexpr Row kRows[] = {
    {"avx", 1, 0, ECX, 28, kYmm},
    {"fma", 1, 0, ECX, 12, kYmm},
    {"f16c", 1, 0, ECX, 29, kYmm},
    {"avx2", 7, 0, EBX, 5, kYmm},
    {"avx_vnni", 7, 1, EAX, 4, kYmm},
    {"avx512f", 7, 0, EBX, 16, kZmm},
    {"avx512dq", 7, 0, EBX, 17, kZmm},
    {"avx512bw", 7, 0, EBX, 30, kZmm},
    {"avx512vl", 7, 0, EBX, 31, kZmm},
    {"avx512_vnni", 7, 0, ECX, 11, kZmm},
    {"avx512_bf16", 7, 1, EAX, 5, kZmm},
    {"avx512_fp16", 7, 0, EDX, 23, kZmm},
    {"amx_tile", 7, 0, EDX, 24, kTile},
    {"amx_int8", 7, 0, EDX, 25, kTile},
    {"amx_bf16", 7, 0, EDX, 22, kTile},
};

uint64_t saved_state() {
    unsigned r[4] = {};
    if (!__get_cpuid(1, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) || !(r[ECX] & kOsxsave)) return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t{high} << 32) | low;
}

bool usable(const Row& row, uint64_t state) {
    unsigned r[4] = {};
    // Leaf 7 reports its last subleaf in EAX; a subleaf beyond it need not read as zero.
    if (row.subleaf > 0 && (!__get_cpuid_count(row.leaf, 0, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) || r[EAX] < row.subleaf))
        return false;
    if (!__get_cpuid_count(row.leaf, row.subleaf, &r[EAX], &r[EBX], &r[ECX], &r[EDX])) return false;
    return (r[row.reg] >> row.bit & 1) && (state & row.state) == row.state;
}

}  // namespace

std::vector<Feature> detect_x86() {
    const uint64_t state = saved_state();
    std::vector<Feature> features;
    for (const Row& row : kRows) features.push_back({row.name, usable(row, state)});
    return features;
}

std::string x86_vendor() {
    unsigned r[4] = {};
    if (!__get_cpuid(0, &r[EAX], &r[EBX], &r[ECX], &r[EDX])) return {};
    const unsigned letters[] = {r[EBX], r[EDX], r[ECX]};
    char name[sizeof letters];
    std::memcpy(name, letters, sizeof letters);
    return {name, sizeof name};
}

}  // namespace opkit

#else

namespace opkit {
std::vector<Feature> detect_x86() { return {}; }
std::string x86_vendor() { return {}; }
}  // namespace opkit

#endif
