// Descriptors of tensors for the tensor memory accelerator (TMA) of sm_90 and newer.
#pragma once

#include <mutex>
#include <vector>

#include "driver.hpp"
#include "sources.hpp"

namespace opkit::launch {

struct alignas(128) EncodedMap {  // a CUtensorMap
    uint64_t words[16];
};

struct MapLayout {
    int64_t source = 0;
    int32_t swizzle = 0;       // a CUtensorMapSwizzle
    int32_t element_type = 0;  // a CUtensorMapDataType
    int64_t element_size = 0;  // in bytes
    std::vector<uint32_t> block;
    bool nan_padding = false, tf32 = false, packed_fp4 = false;
    std::vector<int64_t> sizes, strides;  // what it describes in place of the tensor's own, unless they are empty
};

// One descriptor of an entry. It is encoded when the tensor's sizes or strides change; otherwise its address is replaced.
class TensorMap {
public:
    // Throws std::invalid_argument where the layout is none.
    explicit TensorMap(MapLayout layout);

    // Throws std::runtime_error where the tensor cannot be described so.
    void write(const Driver& driver, const Frame& frame, EncodedMap& map);

    const MapLayout& layout() const { return layout_; }

private:
    static constexpr size_t kMostDims = 5;

    bool encodes(const opk_tensor& tensor) const;
    void encode(const Driver& driver, const Frame& frame, const opk_tensor& tensor);
    void remember(const opk_tensor& tensor);
    [[noreturn]] void refuse(const Frame& frame, const opk_tensor& tensor, const std::string& reason) const;

    MapLayout layout_;
    std::mutex mutex_;
    EncodedMap encoded_{};
    std::vector<int64_t> geometry_;  // sizes, then strides, of the tensor it was encoded for
    void* address_ = nullptr;        // likewise
};

}  // namespace opkit::launch
