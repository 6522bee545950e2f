// Repeated calls one after another, by one call, with memory that is theirs alone while they run.
#pragma once

#include <memory>
#include <vector>

#include "repeated.hpp"

namespace opkit::launch {

class Series {
public:
    // Where a call's tensors lie: at the addresses of launch(), by number, and after these at the pieces of memory.
    using Step = std::pair<std::shared_ptr<const Repeated>, std::vector<size_t>>;

    // `bytes` are those of the pieces of memory, on a device (-1: the CPU). Throws std::invalid_argument where a step has
    // not as many places as its call has tensors, or one that is not there.
    Series(std::vector<Step> steps, size_t addresses, const std::vector<int64_t>& bytes, int32_t device);

    // Throws std::invalid_argument where there are not as many addresses as was said, std::runtime_error where a launch
    // fails, or where there is no memory.
    void launch(const std::vector<uintptr_t>& addresses, uintptr_t stream) const;

private:
    void check() const;

    std::vector<Step> steps_;
    size_t addresses_;
    std::vector<int64_t> offsets_;  // of the pieces
    int64_t bytes_ = 0;             // of all of them
    int32_t device_;
};

}  // namespace opkit::launch
