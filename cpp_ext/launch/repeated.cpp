#include "repeated.hpp"

#include <stdexcept>

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

void Repeated::launch(const std::vector<uintptr_t>& addresses, uintptr_t stream) const {
    if (addresses.size() != layouts_.size())
        throw std::invalid_argument("it was launched with " + std::to_string(addresses.size()) + " tensors, and takes " +
                                    std::to_string(layouts_.size()));
    std::vector<opk_value> values = values_;
    std::vector<opk_tensor> tensors(layouts_.size());
    for (size_t i = 0; i < tensors.size(); i++) {
        tensors[i] = layouts_[i].tensor;
        tensors[i].data = reinterpret_cast<void*>(addresses[i]);
        values[layouts_[i].source].p = &tensors[i];
    }
    if (launcher_.cuda()) values.back().p = reinterpret_cast<void*>(stream);
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
