#include "binary.hpp"

#include <stdexcept>

namespace opkit::launch {
namespace {

constexpr int64_t kSharedForAll = 48 * 1024;  // what every CUDA kernel may use unasked
constexpr int64_t kPortableCluster = 8;

void require(bool holds, const std::string& name, const char* what) {
    if (!holds) throw std::invalid_argument("the compiled kernel " + name + ": " + what);
}

bool fits(const Scratch& scratch) {
    return scratch.bytes >= 0 && scratch.alignment > 0 && (scratch.alignment & (scratch.alignment - 1)) == 0;
}

}  // namespace

Binary::Binary(std::shared_ptr<const Driver> driver, std::string image, std::string name, const Properties& properties)
    : driver_(std::move(driver)), image_(std::move(image)), name_(std::move(name)), properties_(properties) {
    const Extent& cluster = properties.cluster;
    require(!image_.empty(), name_, "its image is empty");
    require(properties.threads > 0 && properties.threads <= 1024, name_, "threads must be from 1 to 1024");
    require(properties.shared >= 0 && properties.shared <= INT32_MAX, name_, "shared must be a number of bytes");
    require(cluster[0] > 0 && cluster[1] > 0 && cluster[2] > 0, name_, "a cluster has at least one block on each axis");
    require(fits(properties.scratch) && fits(properties.profile_scratch), name_,
            "scratch must be a number of bytes, and its alignment a power of two");
}

size_t Binary::slot(int32_t device) {
    if (device < static_cast<int32_t>(kMostDevices)) return device < 0 ? 0 : static_cast<size_t>(device);
    throw std::runtime_error("the device index " + std::to_string(device) + " is above what opkit counts to");
}

void* Binary::load(size_t place) const {
    std::lock_guard<std::mutex> lock(loading_);
    if (void* found = functions_[place].load(std::memory_order_acquire)) return found;
    const int32_t device = static_cast<int32_t>(place);
    const Loading loading(*driver_, device);
    void* module = nullptr;
    void* function = nullptr;
    try {
        function = load_module(device, module);
    } catch (const std::runtime_error& error) {
        if (module != nullptr) driver_->unload_module.pointer(module);
        throw std::runtime_error("the compiled kernel " + name_ + " cannot be loaded on device " +
                                 std::to_string(device) + ": " + error.what());
    }
    functions_[place].store(function, std::memory_order_release);
    return function;
}

void* Binary::load_module(int32_t device, void*& module) const {
    const Driver& driver = *driver_;
    void* function = nullptr;
    driver(driver.load_module, &module, image_.data());
    driver(driver.find_function, &function, module, name_.c_str());
    if (driver.hip()) return function;
    if (properties_.shared > kSharedForAll) allow_shared(function, device);
    if (properties_.blocks() > kPortableCluster)
        driver(driver.set_function_attribute, function, kNonPortableCluster, 1);
    return function;
}

void Binary::allow_shared(void* function, int32_t device) const {
    const Driver& driver = *driver_;
    int32_t handle = 0, most = 0;
    driver(driver.find_device, &handle, device);
    driver(driver.device_attribute, &most, kMaxSharedOptIn, handle);
    if (properties_.shared > most)
        throw std::runtime_error("it needs " + std::to_string(properties_.shared) +
                                 " bytes of shared memory for a block, and the device has " + std::to_string(most) +
                                 "; use smaller blocks or fewer stages");
    if (properties_.prefer_shared) driver(driver.set_cache_preference, function, kPreferShared);
    driver(driver.set_function_attribute, function, kMaxDynamicShared, static_cast<int32_t>(properties_.shared));
}

Attributes Binary::attributes(int32_t device) const {
    void* loaded = function(device);
    const Loading loading(*driver_, device);
    const Driver& driver = *driver_;
    Attributes found{};
    driver(driver.function_attribute, &found.registers, int32_t{kRegisters}, loaded);
    driver(driver.function_attribute, &found.local_bytes, int32_t{kLocalBytes}, loaded);
    driver(driver.function_attribute, &found.shared_bytes, int32_t{kSharedBytes}, loaded);
    driver(driver.function_attribute, &found.max_threads, int32_t{kMaxThreads}, loaded);
    found.shared_bytes += static_cast<int32_t>(properties_.shared);
    return found;
}

std::vector<size_t> Binary::parameter_sizes(int32_t device) const {
    std::vector<size_t> sizes;
    const auto query = driver_->parameter_info.pointer;
    void* loaded = function(device);
    size_t offset, size;
    while (query != nullptr && query(loaded, sizes.size(), &offset, &size) == 0) sizes.push_back(size);
    return sizes;
}

}  // namespace opkit::launch
