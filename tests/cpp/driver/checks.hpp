// What the driver's checks have in common: a place where failures go, and numbers that are the same everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../../cpp_ext/isa/dispatch.hpp"

namespace opkit::driver {

// Counts what was checked, and prints what failed.
class Checks {
public:
    void expect(bool good, const std::string& what);
    int64_t made() const { return made_; }
    int64_t failed() const { return failed_; }

private:
    int64_t made_ = 0, failed_ = 0;
};

// Random numbers by SplitMix64 (Steele, Lea, Flood 2014).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits();
    int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
    double normal();  // nearly: the sum of eight uniform ones

private:
    uint64_t state_;
};

// The ISAs that run here.
using Isas = std::vector<const isa::Choice*>;

void check_conversions(const Isas& isas, Checks& checks);
void check_masks(Checks& checks);
void check_attention(const Isas& isas, Checks& checks);
void check_decoding(const Isas& isas, Checks& checks);
void check_products(const Isas& isas, Checks& checks);

extern int32_t threads;  // that kernels find

}  // namespace opkit::driver
