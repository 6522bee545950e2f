// What runs a kernel's calls: the trampoline of an opk_kernel's only instance.
#pragma once

#include <functional>
#include <string>

#include "table.hpp"

namespace opkit::launch {

class Launcher {
public:
    // Makes the entry for a call that the table has none for; null: the call is done, and nothing is to be remembered.
    using Miss = std::function<std::shared_ptr<const Entry>(const Launcher&, const Frame&, const Key&)>;

    // Throws std::invalid_argument where a role is none.
    Launcher(std::string operator_name, std::string kernel_name, const std::vector<std::string>& roles, Miss miss,
             bool cuda);

    // An opk_trampoline: values[0] is the launcher, then come the sources' values, the lists' lengths and the stream.
    static int32_t trampoline(const opk_value* values, const char** text);

    // One call, of the values that come after the launcher. Throws std::runtime_error where it fails.
    void call(const opk_value* values);

    Frame frame(const opk_value* values) const;

    // The entry that was made for such a call meanwhile, by another thread.
    std::shared_ptr<const Entry> find(const Key& key) const;

    void clear() { table_.clear(), cleared_.fetch_add(1); }
    uint64_t cleared() const { return cleared_.load(); }  // how often
    size_t entries() const { return table_.size(); }
    const std::string& operator_name() const { return operator_name_; }
    const std::string& kernel_name() const { return kernel_name_; }
    bool cuda() const { return cuda_; }

    // Filled in by describe() in kernel.cpp before the first call.
    Sources sources;
    size_t value_count = 0;  // sources and lengths

private:
    std::string operator_name_, kernel_name_;
    Miss miss_;
    bool cuda_;
    Table table_;
    std::atomic<uint64_t> cleared_{0};
};

}  // namespace opkit::launch
