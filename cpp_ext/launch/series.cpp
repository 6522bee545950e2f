#include "series.hpp"

#include <algorithm>
#include <stdexcept>

#include "../runtime/small.hpp"
#include "buffer.hpp"

namespace opkit::launch {
namespace {

constexpr int64_t kAlignment = 128;  // in bytes; the most that a copy by TMA asks for

int64_t rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Series::Series(std::vector<Step> steps, size_t addresses, const std::vector<int64_t>& bytes, int32_t device)
    : steps_(std::move(steps)), addresses_(addresses), device_(device) {
    for (const int64_t each : bytes) {
        if (each < 0) throw std::invalid_argument("a piece of memory has " + std::to_string(each) + " bytes");
        offsets_.push_back(bytes_);
        bytes_ += rounded(each);
    }
    check();
}

void Series::check() const {
    const size_t there = addresses_ + offsets_.size();
    for (const auto& [call, places] : steps_) {
        if (call == nullptr) throw std::invalid_argument("a step has no call");
        if (places.size() != call->tensors())
            throw std::invalid_argument("a step has " + std::to_string(places.size()) + " places, and its call has " +
                                        std::to_string(call->tensors()) + " tensors");
        for (const size_t place : places)
            if (place >= there)
                throw std::invalid_argument("a step has the place " + std::to_string(place) + ", and there are " +
                                            std::to_string(there));
    }
}

void Series::launch(const std::vector<uintptr_t>& addresses, uintptr_t stream) const {
    if (addresses.size() != addresses_)
        throw std::invalid_argument("it was launched with " + std::to_string(addresses.size()) +
                                    " tensors, and takes " + std::to_string(addresses_));
    const Buffer memory = bytes_ == 0 ? Buffer() : Buffer(device_, bytes_, kAlignment);
    Small<uintptr_t, 64> there(addresses_ + offsets_.size());
    std::copy(addresses.begin(), addresses.end(), there.begin());
    for (size_t i = 0; i < offsets_.size(); i++)
        there[addresses_ + i] = reinterpret_cast<uintptr_t>(memory.data()) + static_cast<uintptr_t>(offsets_[i]);
    for (const auto& [call, places] : steps_) {
        Small<uintptr_t, 64> own(places.size());
        std::transform(places.begin(), places.end(), own.begin(), [&](size_t place) { return there[place]; });
        call->launch(own.data(), own.size(), stream);
    }
}

}  // namespace opkit::launch
