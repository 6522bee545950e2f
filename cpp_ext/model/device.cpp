#include "device.hpp"

#include <stdexcept>

namespace opkit::model {

Memory Device::allocate(int64_t bytes) const {
    if (!is_gpu()) return model::allocate(bytes);
    void* owner = nullptr;
    void* data = host_->allocate(host_->context, bytes, &owner);
    if (data == nullptr) throw std::runtime_error("there is no memory for " + std::to_string(bytes) + " bytes on the GPU");
    return {owned(*host_, owner), data};
}

Tensor Device::empty(const opk_tensor& layout) const {
    if (layout.device_index < 0) return Tensor::empty(layout);
    Tensor made = Tensor::view(layout);
    made.memory = allocate(span(layout.sizes, layout.strides, layout.rank) * item_size(layout.dtype));
    made.data = made.memory.get();
    return made;
}

void Device::copy(const opk_tensor& from, const opk_tensor& to) const {
    if (from.device_index < 0 && to.device_index < 0) return model::copy(from, to);
    if (host_->copy(host_->context, &from, &to)) throw std::runtime_error("a tensor cannot be copied");
}

}  // namespace opkit::model
