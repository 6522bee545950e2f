#include "series.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "../runtime/small.hpp"
#include "buffer.hpp"

namespace opkit::launch {
namespace {

constexpr int64_t kApart = 128;  // in bytes; the most that a copy by TMA asks for

int64_t rounded(int64_t bytes) { return (bytes + kApart - 1) / kApart * kApart; }

Buffer memory_of(int32_t device, int64_t bytes) {
    if (bytes == 0) return {};
    try {
        return Buffer(device, bytes, kApart);
    } catch (const std::runtime_error&) {
        throw std::bad_alloc();
    }
}

class Results {  // deletes what was not taken
public:
    explicit Results(size_t count) { handles_.reserve(count); }
    ~Results() {
        for (const Handle handle : handles_) shim().aoti_torch_delete_tensor_object(handle);
    }
    Results(const Results&) = delete;
    Results& operator=(const Results&) = delete;

    uintptr_t add(const ResultLayout& layout, int32_t device) {
        constexpr int32_t kCpu = 0, kCuda = 1;  // torch's device types
        Handle handle = nullptr;
        void* data = nullptr;
        if (shim().aoti_torch_empty_strided(static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(),
                                            layout.strides.data(), layout.dtype, device < 0 ? kCpu : kCuda, device, &handle))
            throw std::bad_alloc();
        handles_.push_back(handle);
        if (shim().torch_get_mutable_data_ptr(handle, &data)) throw std::bad_alloc();
        return reinterpret_cast<uintptr_t>(data);
    }
    std::vector<Handle> take() { return std::exchange(handles_, {}); }

private:
    std::vector<Handle> handles_;
};

}  // namespace

Series::Series(std::vector<Step> steps, size_t addresses, std::vector<ResultLayout> results,
               const std::vector<int64_t>& bytes, int32_t device)
    : steps_(std::move(steps)), addresses_(addresses), results_(std::move(results)), device_(device) {
    for (const int64_t each : bytes) {
        if (each < 0) throw std::invalid_argument("a piece of memory has " + std::to_string(each) + " bytes");
        offsets_.push_back(bytes_);
        bytes_ += rounded(each);
    }
    check();
}

void Series::check() const {
    for (const ResultLayout& result : results_)
        if (result.sizes.size() != result.strides.size())
            throw std::invalid_argument("a result has as many strides as sizes");
    for (const auto& [call, places] : steps_) {
        if (call == nullptr) throw std::invalid_argument("a step has no call");
        if (places.size() != call->tensors())
            throw std::invalid_argument("a step has " + std::to_string(places.size()) + " places, and its call has " +
                                        std::to_string(call->tensors()) + " tensors");
        for (const size_t place : places)
            if (place >= this->places())
                throw std::invalid_argument("a step has the place " + std::to_string(place) + ", and there are " +
                                            std::to_string(this->places()));
    }
}

std::vector<Handle> Series::launch(const std::vector<uintptr_t>& addresses, uintptr_t stream) const {
    if (addresses.size() != addresses_)
        throw std::invalid_argument("it was launched with " + std::to_string(addresses.size()) +
                                    " tensors, and takes " + std::to_string(addresses_));
    Results results(results_.size());
    Small<uintptr_t, 64> there(places());
    uintptr_t* next = std::copy(addresses.begin(), addresses.end(), there.begin());
    for (const ResultLayout& layout : results_) *next++ = results.add(layout, device_);
    const Buffer memory = memory_of(device_, bytes_);
    for (const int64_t offset : offsets_)
        *next++ = reinterpret_cast<uintptr_t>(memory.data()) + static_cast<uintptr_t>(offset);
    for (const auto& [call, places] : steps_) {
        Small<uintptr_t, 64> own(places.size());
        std::transform(places.begin(), places.end(), own.begin(), [&](size_t place) { return there[place]; });
        call->launch(own.data(), own.size(), stream);
    }
    return results.take();
}

}  // namespace opkit::launch
