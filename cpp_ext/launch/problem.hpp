// Launches of kernels that take one structure, which Python fills, and descriptors for TMA of tensors that it names.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "binary.hpp"
#include "tensor_map.hpp"

namespace opkit::launch {

// A tensor in the structure: its address, and its strides in elements by batch, head and row; channels have the stride 1.
struct ProblemRows {
    void* data;
    int64_t batch, head, row;
};

// Boxes of 128 bytes of some rows of a head, as five dimensions: columns of a box, rows, boxes of a row, heads and batches.
struct ProblemMap {
    int64_t place = 0;         // of the ProblemRows, in bytes
    int32_t element_type = 0;  // a CUtensorMapDataType
    int64_t element_size = 0;  // in bytes
    std::array<uint64_t, 5> sizes{};
    std::array<uint32_t, 5> box{};
};

class ProblemLaunch {
public:
    struct Step {
        std::shared_ptr<const Binary> binary;
        Extent grid;
    };

    // Kernels that are launched one after another, each with the structure and all descriptors. Throws std::invalid_argument where
    // there is no step, or a map lies outside of a structure of so many bytes.
    ProblemLaunch(std::vector<Step> steps, std::vector<ProblemMap> maps, int64_t bytes, int32_t device);

    // Throws std::runtime_error, with what the driver says, where a tensor cannot be described or a kernel not launched.
    void launch(const void* problem, void* stream) const;

private:
    void* context() const;  // the device's primary one, which stays as long as the process lives
    void describe(const char* problem, EncodedMap* maps) const;

    std::vector<Step> steps_;
    std::vector<ProblemMap> maps_;
    int32_t device_;
    mutable std::atomic<void*> context_{nullptr};
};

}  // namespace opkit::launch
