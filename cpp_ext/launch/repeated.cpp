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
    for (size_t i = 0; i < tensors.size(); i++) {
        tensors[i] = layouts_[i].tensor;
        tensors[i].data = reinterpret_cast<void*>(addresses[i]);
        values[layouts_[i].source].p = &tensors[i];
    }
    if (launcher_.cuda()) values[values.size() - 1].p = reinterpret_cast<void*>(stream);
    launcher_.call(values.data());
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
