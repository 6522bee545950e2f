#include "tensor_map.hpp"

#include <algorithm>
#include <stdexcept>

namespace opkit::launch {
namespace {

constexpr int32_t kTf32 = 11, kNoInterleave = 0, kPromote128Bytes = 2, kNanPadding = 1;

std::string list(const int64_t* values, int64_t count) {
    std::string text = "[";
    for (int64_t i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(values[i]);
    return text + "]";
}

struct Geometry {  // in the driver's order: the innermost dimension first
    uint64_t sizes[5], strides[5];
    uint32_t block[5];
};

Geometry reversed(const opk_tensor& tensor, const MapLayout& layout) {
    Geometry result{};
    const int64_t rank = tensor.rank;
    for (int64_t d = 0; d < rank; d++) {
        result.sizes[d] = static_cast<uint64_t>(tensor.sizes[rank - 1 - d]);
        result.block[d] = layout.block[static_cast<size_t>(rank - 1 - d)];
        if (d > 0) result.strides[d - 1] = static_cast<uint64_t>(tensor.strides[rank - 1 - d] * layout.element_size);
    }
    if (layout.packed_fp4) result.sizes[0] *= 2;
    return result;
}

// Drivers up to CUDA 13.1 set a bit that is wrong for tensors of less than 128 KiB; CUTLASS clears it too
// (github.com/NVIDIA/cutlass, commit b7ecaa605dd7).
void correct(const Driver& driver, const Geometry& geometry, const MapLayout& layout, int64_t rank, EncodedMap& map) {
    if (driver.loaded_version() > 13010) return;
    uint64_t last = 0;
    for (int64_t d = 0; d < rank; d++)
        last +=
            (geometry.sizes[d] - 1) * (d == 0 ? static_cast<uint64_t>(layout.element_size) : geometry.strides[d - 1]);
    if (last + 1 < 128 * 1024) map.words[1] &= ~(uint64_t{1} << 21);
}

}  // namespace

TensorMap::TensorMap(MapLayout layout) : layout_(std::move(layout)) {
    if (layout_.block.empty() || layout_.block.size() > kMostDims)
        throw std::invalid_argument("a tensor descriptor has from 1 to 5 dimensions");
    if (layout_.sizes.size() != layout_.strides.size())
        throw std::invalid_argument("a tensor descriptor has as many strides as sizes");
    if (layout_.element_size <= 0) throw std::invalid_argument("a tensor descriptor needs the size of its elements");
}

void TensorMap::write(const Driver& driver, const Frame& frame, EncodedMap& map) {
    const opk_tensor* tensor = frame.tensor(static_cast<size_t>(layout_.source));
    if (tensor == nullptr) {
        map = EncodedMap{};
        return;
    }
    opk_tensor seen = *tensor;
    if (!layout_.sizes.empty()) {
        seen.sizes = layout_.sizes.data();
        seen.strides = layout_.strides.data();
        seen.rank = static_cast<int64_t>(layout_.sizes.size());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!encodes(seen)) {
        encode(driver, frame, seen);
    } else if (address_ != seen.data) {
        driver(driver.replace_address, static_cast<void*>(&encoded_), seen.data);
        address_ = seen.data;
    }
    map = encoded_;
}

bool TensorMap::encodes(const opk_tensor& tensor) const {
    const size_t rank = static_cast<size_t>(tensor.rank);
    return geometry_.size() == 2 * rank && std::equal(tensor.sizes, tensor.sizes + rank, geometry_.begin()) &&
           std::equal(tensor.strides, tensor.strides + rank, geometry_.begin() + tensor.rank) && address_ != nullptr;
}

void TensorMap::encode(const Driver& driver, const Frame& frame, const opk_tensor& tensor) {
    const int64_t rank = tensor.rank;
    if (static_cast<size_t>(rank) != layout_.block.size())
        refuse(frame, tensor, "it must have " + std::to_string(layout_.block.size()) + " dimensions");
    if (tensor.strides[rank - 1] != 1 && tensor.sizes[rank - 1] != 1)
        refuse(frame, tensor, "its last dimension must have the stride 1");
    const Geometry geometry = reversed(tensor, layout_);
    static constexpr uint32_t kEach[5] = {1, 1, 1, 1, 1};
    address_ = nullptr;
    try {
        driver(driver.encode_map, static_cast<void*>(&encoded_), layout_.tf32 ? kTf32 : layout_.element_type,
               static_cast<uint32_t>(rank), tensor.data, geometry.sizes, geometry.strides, geometry.block, kEach,
               kNoInterleave, layout_.swizzle, kPromote128Bytes, layout_.nan_padding ? kNanPadding : 0);
    } catch (const std::runtime_error& error) {
        refuse(frame, tensor, error.what());
    }
    correct(driver, geometry, layout_, rank, encoded_);
    remember(tensor);
}

void TensorMap::remember(const opk_tensor& tensor) {
    geometry_.assign(tensor.sizes, tensor.sizes + tensor.rank);
    geometry_.insert(geometry_.end(), tensor.strides, tensor.strides + tensor.rank);
    address_ = tensor.data;
}

void TensorMap::refuse(const Frame& frame, const opk_tensor& tensor, const std::string& reason) const {
    const std::vector<int64_t> block(layout_.block.begin(), layout_.block.end());
    throw std::runtime_error(
        "no tensor descriptor can be made of " + frame.source(static_cast<size_t>(layout_.source)).name + ": " +
        reason + "; its sizes are " + list(tensor.sizes, tensor.rank) + ", its strides " +
        list(tensor.strides, tensor.rank) + " in elements of " + std::to_string(layout_.element_size) +
        " bytes, the block is " + list(block.data(), static_cast<int64_t>(block.size())) +
        ". The address and all strides but the last must be multiples of 16 bytes");
}

}  // namespace opkit::launch
