// Calls like one that was made: of tensors elsewhere in memory, everything else the same. They do not pass torch's dispatcher.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "launcher.hpp"

namespace opkit::launch {

class Repeated {
public:
    // Of a call's values. Throws std::invalid_argument where some of them are pointers to what the call alone has.
    Repeated(Launcher& launcher, const opk_value* values);

    // How many tensors are there.
    size_t tensors() const { return layouts_.size(); }

    // The tensors' addresses come in the order of the launcher's sources. Throws std::invalid_argument where there are not as
    // many as tensors that are there, std::runtime_error where the launch fails.
    void launch(const uintptr_t* addresses, size_t count, uintptr_t stream) const;

private:
    struct Layout {
        size_t source;
        opk_tensor tensor;
        std::vector<int64_t> dims;  // sizes, then strides
    };
    struct Found {  // what served the last call, and what of the addresses decided that
        uint64_t aligned, cleared;
        std::shared_ptr<const Entry> entry;
    };
    std::shared_ptr<const Entry> found(uint64_t aligned) const;
    void find(const Frame& frame, uint64_t aligned, uint64_t cleared) const;
    void remember(size_t source, const opk_tensor* tensor);

    Launcher& launcher_;  // lives as long as the process
    std::vector<opk_value> values_;
    std::vector<Layout> layouts_;
    mutable std::mutex mutex_;
    mutable Found found_{};
};

// While it lives, the last call of the launcher that its thread makes is remembered.
class Remembering {
public:
    explicit Remembering(Launcher& launcher);
    ~Remembering();
    Remembering(const Remembering&) = delete;
    Remembering& operator=(const Remembering&) = delete;

    static void note(Launcher& launcher, const opk_value* values);
    std::shared_ptr<const Repeated> found;  // null: none was made, or it cannot be repeated

private:
    Launcher& launcher_;
    Remembering* before_;
};

}  // namespace opkit::launch
