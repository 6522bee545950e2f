// Memory from torch's allocator, for as long as a launch or a measurement needs it.
#pragma once

#include "../runtime/shim.hpp"
#include "sources.hpp"

namespace opkit::launch {

class Buffer {
public:
    Buffer() = default;
    // Throws std::runtime_error where torch has not so much.
    Buffer(int32_t device, int64_t bytes, int64_t alignment = 1);
    ~Buffer();
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) = delete;

    void* data() const { return data_; }
    int64_t size() const { return size_; }

private:
    Handle tensor_ = nullptr;
    void* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace opkit::launch
