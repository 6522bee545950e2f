#include "launcher.hpp"

#include <stdexcept>

#include "repeated.hpp"

namespace opkit::launch {

Launcher::Launcher(std::string operator_name, std::string kernel_name, const std::vector<std::string>& roles, Miss miss,
                   bool cuda)
    : operator_name_(std::move(operator_name)),
      kernel_name_(std::move(kernel_name)),
      miss_(std::move(miss)),
      cuda_(cuda) {
    for (const std::string& role : roles) sources.push_back({parse_role(role), "", OPK_KIND_INT, kPlain, 0, false});
}

int32_t Launcher::trampoline(const opk_value* values, const char** text) {
    static thread_local std::string reason;
    try {
        Launcher& launcher = *static_cast<Launcher*>(values[0].p);
        launcher.call(values + 1);
        Remembering::note(launcher, values + 1);
    } catch (const std::exception& error) {
        reason = error.what();
        *text = reason.c_str();
    }
    return 0;
}

Frame Launcher::frame(const opk_value* values) const {
    Frame frame{values, &sources, -1, cuda_ ? values[value_count].p : nullptr};
    for (size_t i = 0; i < sources.size(); i++)
        if (sources[i].tensor() && frame.tensor(i) != nullptr) {
            frame.device = frame.tensor(i)->device_index;
            break;
        }
    return frame;
}

void Launcher::call(const opk_value* values) {
    const Frame frame = this->frame(values);
    const Key key(frame);
    {
        const Table::Reading reading(table_);
        if (const auto* entry = table_.find(key)) return (*entry)->launch(frame);
    }
    const std::shared_ptr<const Entry> made = miss_(*this, frame, key);
    if (made == nullptr) return;
    made->check(sources);
    made->launch(frame);
    table_.insert(key, made);
}

std::shared_ptr<const Entry> Launcher::find(const Key& key) const {
    const Table::Reading reading(table_);
    const auto* entry = table_.find(key);
    return entry == nullptr ? nullptr : *entry;
}

}  // namespace opkit::launch
