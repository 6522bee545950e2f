// Where a model runs: the CPU, or a GPU whose memory the caller provides.
#pragma once

#include "opkit_model.h"
#include "tensor.hpp"

namespace opkit::model {

// Memory of the host's, which may live longer than the model.
inline Memory owned(const opkit_operators& host, void* owner) {
    return {owner, [release = host.release, context = host.context](void* held) { release(context, held); }};
}

class Device {
public:
    Device() = default;                                            // the CPU
    explicit Device(const opkit_operators* host) : host_(host) {}  // the host's GPU

    bool is_gpu() const { return host_ != nullptr; }
    int32_t number() const { return is_gpu() ? host_->device : -1; }
    void* stream() const { return is_gpu() ? host_->stream(host_->context) : nullptr; }

    // Memory of the device. Throws std::runtime_error, or std::bad_alloc.
    Memory allocate(int64_t bytes) const;
    Tensor empty(const opk_tensor& layout) const;                   // there, unless the layout's device_index is -1
    void copy(const opk_tensor& from, const opk_tensor& to) const;  // from or to it, or on the CPU

private:
    const opkit_operators* host_ = nullptr;
};

}  // namespace opkit::model
