// Checks the kernels of every ISA that runs here, without Python and torch. Ends with 1 where one failed, and names it.
#include <cstdio>
#include <stdexcept>

#include "checks.hpp"

namespace opkit::driver {

void Checks::expect(bool good, const std::string& what) {
    ++made_;
    if (good) return;
    if (++failed_ <= 40) std::fprintf(stderr, "FAILED  %s\n", what.c_str());
}

uint64_t Random::bits() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double Random::normal() {
    double sum = -4;
    for (int i = 0; i < 8; ++i) sum += static_cast<double>(bits() >> 11) * 0x1p-53;
    return sum * 1.224744871391589;
}

namespace {

Isas those_that_run() {
    Isas found;
    for (const isa::Choice& choice : isa::choices())
        if (choice.obstacle.empty())
            found.push_back(&choice);
        else
            std::printf("%s is not checked: %s\n", choice.cap.c_str(), choice.obstacle.c_str());
    return found;
}

int run() {
    Checks checks;
    const Isas isas = those_that_run();
    check_conversions(isas, checks);
    check_masks(checks);
    check_attention(isas, checks);
    check_decoding(isas, checks);
    check_products(isas, checks);
    for (const isa::Choice* choice : isas) std::printf("%s ", choice->cap.c_str());
    std::printf("were checked: %lld checks, %lld failed\n", static_cast<long long>(checks.made()),
                static_cast<long long>(checks.failed()));
    return checks.failed() ? 1 : 0;
}

}  // namespace
}  // namespace opkit::driver

int main() {
    try {
        return opkit::driver::run();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "FAILED  %s\n", error.what());
        return 1;
    }
}
