// 64-bit Arm on Linux: the kernel says, in the auxiliary vector, what programs may use.
// Bit positions: Linux, Documentation/arch/arm64/elf_hwcaps.rst and the user-space header asm/hwcap.h.
#include "cpu_features.hpp"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

namespace opkit {
namespace {

struct Row {
    const char* name;
    unsigned long word;  // AT_HWCAP or AT_HWCAP2
    unsigned bit;
};

constexpr Row kRows[] = {
    {"neon", AT_HWCAP, 1},      // HWCAP_ASIMD
    {"fp16", AT_HWCAP, 10},     // HWCAP_ASIMDHP
    {"dotprod", AT_HWCAP, 20},  // HWCAP_ASIMDDP
    {"sve", AT_HWCAP, 22},      // HWCAP_SVE
    {"sve2", AT_HWCAP2, 1},     // HWCAP2_SVE2
    {"i8mm", AT_HWCAP2, 13},    // HWCAP2_I8MM
    {"bf16", AT_HWCAP2, 14},    // HWCAP2_BF16
    {"sme", AT_HWCAP2, 23},     // HWCAP2_SME
};

}  // namespace

std::vector<Feature> detect_arm() {
    std::vector<Feature> features;
    for (const Row& row : kRows) features.push_back({row.name, (getauxval(row.word) >> row.bit & 1) != 0});
    return features;
}

}  // namespace opkit

#else

namespace opkit {
std::vector<Feature> detect_arm() {
#if defined(__aarch64__)
    return {{"neon", true}};  // part of the base architecture; the rest is not asked for outside Linux
#else
    return {};
#endif
}
}  // namespace opkit

#endif
