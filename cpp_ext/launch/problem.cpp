#include "problem.hpp"

#include <cstring>
#include <stdexcept>

namespace opkit::launch {
namespace {

constexpr size_t kMostMaps = 8;
constexpr int32_t kNoInterleave = 0, kSwizzle128Bytes = 3, kPromote256Bytes = 3, kZeros = 0;
constexpr uint64_t kBoxBytes = 128;

// A context is current for a while.
class Current {
public:
    Current(const Driver& driver, void* context) : driver_(driver) {
        driver(driver.get_context, &before_);
        if (before_ != context) driver(driver.set_context, context);
        changed_ = before_ != context && before_ != nullptr;  // a thread that has none keeps this one
    }
    ~Current() {
        if (changed_) driver_.set_context.pointer(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

private:
    const Driver& driver_;
    void* before_ = nullptr;
    bool changed_ = false;
};

}  // namespace

ProblemLaunch::ProblemLaunch(std::vector<Step> steps, std::vector<ProblemMap> maps, int64_t bytes, int32_t device)
    : steps_(std::move(steps)), maps_(std::move(maps)), device_(device) {
    if (steps_.empty() || maps_.size() > kMostMaps || device < 0)
        throw std::invalid_argument("a problem has a kernel or more, at most 8 tensor descriptors, and a device");
    for (const ProblemMap& map : maps_)
        if (map.place < 0 || map.place + static_cast<int64_t>(sizeof(ProblemRows)) > bytes)
            throw std::invalid_argument("a tensor descriptor is of a place that the problem does not have");
}

void* ProblemLaunch::context() const {
    void* context = context_.load(std::memory_order_acquire);
    if (context != nullptr) return context;
    const Driver& driver = steps_.front().binary->driver();
    int32_t handle = 0;
    driver(driver.initialize, 0u);
    driver(driver.find_device, &handle, device_);
    driver(driver.retain_context, &context, handle);
    context_.store(context, std::memory_order_release);
    return context;
}

void ProblemLaunch::describe(const char* problem, EncodedMap* maps) const {
    const Driver& driver = steps_.front().binary->driver();
    static constexpr uint32_t kEach[5] = {1, 1, 1, 1, 1};
    for (size_t i = 0; i < maps_.size(); i++) {
        const ProblemMap& map = maps_[i];
        ProblemRows rows;
        std::memcpy(&rows, problem + map.place, sizeof(rows));
        const auto bytes = [&](int64_t elements) { return static_cast<uint64_t>(elements * map.element_size); };
        const uint64_t strides[] = {bytes(rows.row), kBoxBytes, bytes(rows.head), bytes(rows.batch)};
        driver(driver.encode_map, static_cast<void*>(&maps[i]), map.element_type, 5u, rows.data, map.sizes.data(),
               static_cast<const uint64_t*>(strides), map.box.data(), static_cast<const uint32_t*>(kEach), kNoInterleave,
               kSwizzle128Bytes, kPromote256Bytes, kZeros);
    }
}

void ProblemLaunch::launch(const void* problem, void* stream) const {
    const Driver& driver = steps_.front().binary->driver();
    const Current current(driver, context());
    EncodedMap maps[kMostMaps];
    describe(static_cast<const char*>(problem), maps);
    void* parameters[] = {const_cast<void*>(problem), maps};
    for (const Step& step : steps_) {
        const Properties& properties = step.binary->properties();
        LaunchAttribute early{kProgrammaticStreamSerialization, {}, {1}};
        LaunchConfig config{{}, {static_cast<uint32_t>(properties.threads), 1, 1}, static_cast<uint32_t>(properties.shared),
                            stream, &early, properties.pdl ? 1u : 0u};
        for (size_t axis = 0; axis < 3; axis++) config.grid[axis] = static_cast<uint32_t>(step.grid[axis]);
        driver(driver.launch_extended, static_cast<const LaunchConfig*>(&config), step.binary->function(device_),
               static_cast<void**>(parameters), static_cast<void**>(nullptr));
    }
}

}  // namespace opkit::launch
