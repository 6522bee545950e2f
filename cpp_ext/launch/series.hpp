// Repeated calls one after another, by one call, which allocates their results and memory that is theirs alone meanwhile.
#pragma once

#include <memory>
#include <vector>

#include "../runtime/shim.hpp"
#include "repeated.hpp"

namespace opkit::launch {

struct ResultLayout {
    std::vector<int64_t> sizes, strides;
    int32_t dtype;  // torch's number
};

class Series {
public:
    // Where a call's tensors lie: at the addresses of launch(), by number, after these in the results, and then at the pieces
    // of memory.
    using Step = std::pair<std::shared_ptr<const Repeated>, std::vector<size_t>>;

    // `bytes` are those of the pieces of memory. They and the results are on a device (-1: the CPU). Throws
    // std::invalid_argument where a step has not as many places as its call has tensors, or one that is not there.
    Series(std::vector<Step> steps, size_t addresses, std::vector<ResultLayout> results, const std::vector<int64_t>& bytes,
           int32_t device);

    // Gives the results, which are the caller's to delete. Throws std::invalid_argument where there are not as many addresses
    // as was said, std::bad_alloc where there is no memory, before any launch, and std::runtime_error where one fails.
    std::vector<Handle> launch(const std::vector<uintptr_t>& addresses, uintptr_t stream) const;

private:
    void check() const;
    size_t places() const { return addresses_ + results_.size() + offsets_.size(); }

    std::vector<Step> steps_;
    size_t addresses_;
    std::vector<ResultLayout> results_;
    std::vector<int64_t> offsets_;  // of the pieces
    int64_t bytes_ = 0;             // of all of them
    int32_t device_;
};

}  // namespace opkit::launch
