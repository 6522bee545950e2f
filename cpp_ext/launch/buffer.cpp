#include "buffer.hpp"

#include <stdexcept>
#include <utility>

namespace opkit::launch {

Buffer::Buffer(int32_t device, int64_t bytes, int64_t alignment) : size_(bytes) {
    constexpr int32_t kCpu = 0, kCuda = 1;  // torch's device types
    const int64_t room = bytes + alignment - 1, stride = 1;
    if (shim().aoti_torch_empty_strided(1, &room, &stride, OPK_UINT8, device < 0 ? kCpu : kCuda, device, &tensor_) ||
        shim().torch_get_mutable_data_ptr(tensor_, &data_))
        throw std::runtime_error("torch has no memory for " + std::to_string(bytes) + " bytes of scratch");
    const uintptr_t step = static_cast<uintptr_t>(alignment);
    data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data_) + step - 1) & ~(step - 1));
}

Buffer::~Buffer() {
    if (tensor_ != nullptr) shim().aoti_torch_delete_tensor_object(tensor_);
}

Buffer::Buffer(Buffer&& other) noexcept
    : tensor_(std::exchange(other.tensor_, nullptr)), data_(other.data_), size_(other.size_) {}

}  // namespace opkit::launch
