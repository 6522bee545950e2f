#include "repeated.hpp"

#include <algorithm>
#include <stdexcept>

#include "../runtime/small.hpp"

namespace opkit::launch {
namespace {

thread_local Remembering* remembering = nullptr;

}  // namespace

Repeated::Repeated(Launcher& launcher, const opk_value* values)
    : launcher_(launcher), values_(values, values + launcher.value_count + (launcher.cuda() ? 1 : 0)) {
    layouts_.reserve(launcher.sources.size());
    for (size_t i = 0; i < launcher.sources.size(); i++) {
        const Source& source = launcher.sources[i];
        if (source.tensor())
            remember(i, static_cast<const opk_tensor*>(values[i].p));
        else if (source.pointer != kPlain || source.role == Role::kText || source.role == Role::kInts)
            throw std::invalid_argument(source.name + " lies in memory that is the call's");
    }
}

void Repeated::remember(size_t source, const opk_tensor* tensor) {
    if (tensor == nullptr) return;
    Layout& layout = layouts_.emplace_back(Layout{source, *tensor, {}});
    layout.dims.assign(tensor->sizes, tensor->sizes + tensor->rank);
    layout.dims.insert(layout.dims.end(), tensor->strides, tensor->strides + tensor->rank);
    layout.tensor.sizes = layout.dims.data();
    layout.tensor.strides = layout.dims.data() + tensor->rank;
}

void Repeated::launch(const uintptr_t* addresses, size_t count, uintptr_t stream) const {
    if (count != tensors())
        throw std::invalid_argument("it was launched with " + std::to_string(count) + " tensors, and takes " +
                                    std::to_string(tensors()));
    Small<opk_value, 64> values(values_.size());
    Small<opk_tensor, 32> tensors(layouts_.size());
    std::copy(values_.begin(), values_.end(), values.begin());
    uint64_t aligned = 0;
    for (size_t i = 0; i < tensors.size(); i++) {
        tensors[i] = layouts_[i].tensor;
        tensors[i].data = reinterpret_cast<void*>(addresses[i]);
        values[layouts_[i].source].p = &tensors[i];
        aligned = aligned << 1 | uint64_t{addresses[i] % kAlignment == 0};
    }
    if (launcher_.cuda()) values[values.size() - 1].p = reinterpret_cast<void*>(stream);
    const Frame frame = launcher_.frame(values.data());
    if (const auto entry = found(aligned)) return entry->launch(frame);
    const uint64_t cleared = launcher_.cleared();
    launcher_.call(values.data());
    if (tensors.size() <= 64) find(frame, aligned, cleared);
}

std::shared_ptr<const Entry> Repeated::found(uint64_t aligned) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool same = found_.aligned == aligned && found_.cleared == launcher_.cleared();
    return same ? found_.entry : nullptr;
}

void Repeated::find(const Frame& frame, uint64_t aligned, uint64_t cleared) const {
    auto entry = launcher_.find(Key(frame));
    std::lock_guard<std::mutex> lock(mutex_);
    found_ = {aligned, cleared, std::move(entry)};
}

Remembering::Remembering(Launcher& launcher) : launcher_(launcher), before_(remembering) { remembering = this; }

Remembering::~Remembering() { remembering = before_; }

void Remembering::note(Launcher& launcher, const opk_value* values) {
    if (remembering == nullptr || &remembering->launcher_ != &launcher) return;
    try {
        remembering->found = std::make_shared<Repeated>(launcher, values);
    } catch (const std::invalid_argument&) {
        remembering->found = nullptr;
    }
}

}  // namespace opkit::launch
